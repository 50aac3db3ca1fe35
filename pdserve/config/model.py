"""Which model is served, in which form and on which device."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from pdserve.config.declare import Switch, setting


class Dtype(enum.Enum):
    """The data type of weights, activations and KV cache."""

    BF16 = "bfloat16"
    FP32 = "float32"

    @property
    def short(self) -> str:
        """The name in handshakes, file names and figures, which nodes of other versions know: ``bf16`` or ``fp32``."""
        return self.name.lower()


class Weights(enum.Enum):
    """The form in which quantised weights are held in memory."""

    AUTO = "auto"
    DEQUANTISE = "dequantise"


class Device(enum.Enum):
    """The kind of device that computes."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


MODEL_HELP = (
    "The model is a name of the hub (org/name, org/name@revision, org/name:Q4_K_M, org/name/file.gguf), a Hugging Face "
    "folder, a .gguf file, or 'demo' for SmolLM2-135M-Instruct."
)


def offline() -> Any:
    return setting(
        "offline",
        "No model is fetched: a name of the hub means what is in the cache of Hugging Face models. HF_HUB_OFFLINE does "
        "the same.",
        Switch.OFF,
        bare="on",
        first=True,
    )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model and the device that computes it."""

    path: str = setting("model", MODEL_HELP, "demo", first=True)
    served_model_name: str = setting(
        "served-model-name",
        "Clients ask for the model by this name. If it is empty, they use the name of the hub as --model has it, "
        "without a revision, or the name of the folder or file.",
        "",
        former="served-name",
        first=True,
    )
    dtype: Dtype = setting(
        "dtype",
        "Weights and KV cache have this number format. 'auto' is bfloat16.",
        Dtype.BF16,
        spellings={"auto": "bfloat16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"},
        refused=dict.fromkeys(("float16", "half", "fp16"), "pdserve computes in bfloat16, which takes as much memory"),
        first=True,
    )
    weights: Weights = setting(
        "weights",
        "'auto' keeps the blocks of a quantised .gguf file, and repacks quantised weights of a folder into blocks, "
        "where it can (bf16, on a GPU or on a CPU with g++). 'dequantise' widens them to --dtype.",
        Weights.AUTO,
    )
    max_model_len: int = setting(
        "max-model-len",
        "A prompt and its output have at most this many tokens together. 0 takes the model's own limit, or what the KV "
        "cache holds if that is less.",
        0,
        minimum=0,
        first=True,
    )
    offline: Switch = offline()
    device: Device = setting(
        "device",
        "This kind of device computes. 'auto' takes a GPU if there is one, and otherwise the CPU.",
        Device.AUTO,
    )
    cuda_graphs: Switch = setting(
        "cuda-graphs", "A GPU's decode steps are recorded once and replayed. 'off' launches each kernel.", Switch.ON
    )


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """The model that is meant, and whether the hub may be asked for it."""

    path: str = setting("model", MODEL_HELP, "", first=True)
    offline: Switch = offline()
