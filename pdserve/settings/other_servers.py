"""The flags of vLLM, SGLang, llama.cpp and Ollama that pdserve understands under its own names, or refuses by name.

Their own documentation lists their flags. A flag that pdserve has under the same name and with the same
meaning is not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from pdserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Understood:
    """The flag means one of pdserve's."""

    flag: str
    value: str = ""
    """The value that it stands for; empty if its own value follows."""


@dataclass(frozen=True, slots=True)
class Always:
    """The flag asks for what pdserve always does. It takes no value, and changes nothing."""


@dataclass(frozen=True, slots=True)
class Refused:
    """pdserve cannot do what the flag asks for."""

    instead: str
    """What would be right, as a sentence without its first capital."""


_NO_REMOTE_CODE = Refused("pdserve never runs code that comes with a model")
_OWN_FOLDER = Refused("tokeniser and weights are those of --model, whose files say their format")
_IN_NAME = Refused("the name of the model has it: --model org/name@REVISION, or --model org/name/FILE.gguf")
_HF_HOME = Refused("the variable HF_HOME names the folder for models that are fetched")
_LAYERS = Refused("a model computes on one kind of device as a whole: --device cuda or --device cpu")
_CORES = Refused("--cores names the cores of a node, of which each has a thread")
_MEMORY = Refused("weights are mapped from their files, and the KV cache takes what --kv-cache-mib says")
_REQUEST_SAYS = Refused("each request says how its tokens are chosen; 'pdserve chat' has --temperature")
_QUANTISED = Refused("quantised weights are taken from a .gguf file: give it with --model")
_RANKS_ONLY = Refused("start more nodes at the proxy, or split a model with --tensor-parallel-size")
_NO_LORA = Refused("pdserve has no LoRA adapters; merge the adapter into the model")
_SPECULATION = Refused(
    "--speculation says what guesses tokens (auto, ngram, mtp or off), --draft-tokens how many, "
    "and --draft-model which other model"
)
_BY_SUBCOMMAND = Refused("'pdserve prefill' and 'pdserve decode' are the two sides; --proxy brings them together")
_BY_REQUEST = Refused("requests have a seed, and an answer without one gets its own")

SHORT: Mapping[str, str] = {
    "-m": "model",
    "-hf": "hf-repo",
    "-hfr": "hf-repo",
    "-hff": "hf-file",
    "-mu": "model-url",
    "-a": "alias",
    "-c": "ctx-size",
    "-n": "predict",
    "-p": "prompt",
    "-sys": "system-prompt",
    "-b": "batch-size",
    "-ub": "ubatch-size",
    "-np": "parallel",
    "-ngl": "n-gpu-layers",
    "-t": "threads",
    "-tb": "threads-batch",
    "-fa": "flash-attn",
    "-ctk": "cache-type-k",
    "-ctv": "cache-type-v",
    "-md": "model-draft",
    "-sm": "split-mode",
    "-ts": "tensor-split",
    "-mg": "main-gpu",
    "-cnv": "conversation",
    "-st": "single-turn",
    "-i": "interactive",
    "-s": "seed",
    "-v": "verbose",
    "-tp": "tp",
    "-dp": "dp-size",
    "-pp": "pp-size",
}
"""Short flags, and the long ones of which they are abbreviations: others' in ``MEANINGS``, or pdserve's own."""

MEANINGS: Mapping[str, Understood | Always | Refused] = {
    # Names that both servers or one of them have for a setting of ours.
    "model-path": Understood("model"),
    "context-length": Understood("max-model-len"),
    "tp": Understood("tensor-parallel-size"),
    "tp-size": Understood("tensor-parallel-size"),
    "max-running-requests": Understood("max-num-seqs"),
    "chunked-prefill-size": Understood("max-num-batched-tokens"),
    "max-queued-requests": Understood("max-waiting"),
    "mem-fraction-static": Understood("gpu-memory-utilization"),
    "page-size": Understood("block-size"),
    "tool-call-parser": Understood("tool-parser"),
    "ssl-certfile": Understood("tls-cert"),
    "ssl-keyfile": Understood("tls-key"),
    "uvicorn-log-level": Understood("log-level"),
    "enable-prefix-caching": Understood("prefix-cache", "on"),
    "no-enable-prefix-caching": Understood("prefix-cache", "off"),
    "disable-radix-cache": Understood("prefix-cache", "off"),
    "enforce-eager": Understood("cuda-graphs", "off"),
    "disable-cuda-graph": Understood("cuda-graphs", "off"),
    "disable-overlap-schedule": Understood("overlap-scheduling", "off"),
    "async-scheduling": Understood("overlap-scheduling", "on"),
    "no-async-scheduling": Understood("overlap-scheduling", "off"),
    "hf-repo": Understood("model"),
    "alias": Understood("served-model-name"),
    "ctx-size": Understood("max-model-len"),
    "parallel": Understood("max-num-seqs"),
    "batch-size": Refused(
        "--max-num-batched-tokens is what one step computes at most, which llama.cpp has as --ubatch-size"
    ),
    "ubatch-size": Understood("max-num-batched-tokens"),
    "predict": Understood("max-tokens"),
    "n-predict": Understood("max-tokens"),
    "prompt": Understood("ask"),
    "system-prompt": Understood("system"),
    "temp": Understood("temperature"),
    "ssl-cert-file": Understood("tls-cert"),
    "ssl-key-file": Understood("tls-key"),
    "no-warmup": Refused("a node warms up before it takes requests, so that the first one is as quick as the others"),
    # What needs no flag here.
    "jinja": Always(),
    "cont-batching": Always(),
    "conversation": Always(),
    "interactive": Always(),
    "metrics": Always(),
    "slots": Refused("'pdserve top' shows the requests of each node"),
    "flash-attn": Refused("there is one kind of attention kernel for each device, and nothing to choose"),
    "single-turn": Refused("'pdserve chat' answers one question with --ask"),
    "enable-auto-tool-choice": Always(),
    "enable-chunked-prefill": Always(),
    "enable-metrics": Always(),
    "enable-prompt-tokens-details": Always(),
    "enable-cache-report": Always(),
    "enable-log-requests": Always(),
    "no-enable-log-requests": Refused("--log-level warning leaves out the line of each request"),
    "disable-log-requests": Refused("--log-level warning leaves out the line of each request"),
    "max-total-tokens": Refused("--kv-cache-mib says how much memory the KV cache takes"),
    "num-gpu-blocks-override": Refused("--kv-cache-mib says how much memory the KV cache takes"),
    "schedule-policy": Refused("requests are served in the order of their priority, then as they come"),
    "generation-config": Refused("requests say how to sample, and generation_config.json which tokens end an answer"),
    "disable-fastapi-docs": Refused("keep /docs and /openapi.json from strangers by what stands in front of the proxy"),
    # What pdserve does not do.
    "trust-remote-code": _NO_REMOTE_CODE,
    "tokenizer": _OWN_FOLDER,
    "tokenizer-path": _OWN_FOLDER,
    "revision": _IN_NAME,
    "hf-file": _IN_NAME,
    "hf-token": Refused("the variable HF_TOKEN has the token"),
    "model-url": Refused("--model takes a name of the hub, a folder or a file"),
    "download-dir": _HF_HOME,
    "load-format": _OWN_FOLDER,
    "n-gpu-layers": _LAYERS,
    "gpu-layers": _LAYERS,
    "split-mode": Refused("--tensor-parallel-size splits a model over GPUs"),
    "tensor-split": Refused("--tensor-parallel-size splits a model over GPUs, in equal parts"),
    "main-gpu": Refused("the variable CUDA_VISIBLE_DEVICES says which GPUs a process has"),
    "threads": _CORES,
    "threads-batch": _CORES,
    "mlock": _MEMORY,
    "no-mmap": _MEMORY,
    "keepalive": Refused("a model is in memory for as long as its node runs"),
    "top-k": _REQUEST_SAYS,
    "top-p": _REQUEST_SAYS,
    "min-p": _REQUEST_SAYS,
    "repeat-penalty": _REQUEST_SAYS,
    "embedding": Refused("pdserve has no embeddings"),
    "embeddings": Refused("pdserve has no embeddings"),
    "mmproj": Refused("pdserve takes no images"),
    "hf-overrides": Refused("change config.json in the model's folder"),
    "json-model-override-args": Refused("change config.json in the model's folder"),
    "chat-template": Refused("put the template into the model's folder, as chat_template.jinja"),
    "quantization": _QUANTISED,
    "cache-type-k": Refused("the KV cache has the format of --dtype"),
    "cache-type-v": Refused("the KV cache has the format of --dtype"),
    "swap-space": Refused("--kv-cache-mib is the whole KV cache; preempted requests are computed again"),
    "cpu-offload-gb": Refused("the model has to fit; --tensor-parallel-size splits it over ranks"),
    "pipeline-parallel-size": _RANKS_ONLY,
    "pp-size": _RANKS_ONLY,
    "data-parallel-size": _RANKS_ONLY,
    "dp-size": _RANKS_ONLY,
    "enable-expert-parallel": _RANKS_ONLY,
    "ep-size": _RANKS_ONLY,
    "nnodes": _RANKS_ONLY,
    "enable-lora": _NO_LORA,
    "lora-modules": _NO_LORA,
    "lora-paths": _NO_LORA,
    "lora": _NO_LORA,
    "speculative-config": _SPECULATION,
    "speculative-algorithm": _SPECULATION,
    "speculative-num-draft-tokens": Understood("draft-tokens"),
    "draft-max": Understood("draft-tokens"),
    "model-draft": Understood("draft-model"),
    "speculative-draft-model-path": Understood("draft-model"),
    "seed": _BY_REQUEST,
    "random-seed": _BY_REQUEST,
    "kv-transfer-config": _BY_SUBCOMMAND,
    "disaggregation-mode": _BY_SUBCOMMAND,
    "disaggregation-transfer-backend": Refused("KV blocks travel over UCX; --ucx-tls names its transports"),
    "disaggregation-ib-device": Refused("--ucx-net-devices names the network devices"),
    "allowed-origins": Refused("--cors-origins takes the origins, with commas between them"),
    "uds": Refused("--host and --port say where the server listens"),
}


def own_words(argv: Sequence[str], own: Set[str] = frozenset()) -> list[str]:
    """Returns ``argv`` with the flags of other servers replaced by what they mean here.

    ``own`` are the subcommand's own flags, which mean what they mean there. Raises ConfigError for a flag that asks for
    what pdserve does not do, and for a value of one that takes none; it says what would be right.
    """
    words: list[str] = []
    for word in argv:
        name, equals, value = word.partition("=")
        flag = _flag(name)
        meaning = None if flag in own else MEANINGS.get(flag)
        if name in SHORT and meaning is None:
            # It abbreviates a flag of pdserve's own.
            name, word = f"--{flag}", f"--{flag}{equals}{value}"
        if equals and (isinstance(meaning, Always) or (isinstance(meaning, Understood) and meaning.value)):
            raise ConfigError(f"{name} takes no value; {value!r} was given")
        match meaning:
            case None:
                words.append(word)
            case Understood(flag, fixed):
                words.append(f"--{flag}={fixed}" if fixed else f"--{flag}{equals}{value}")
            case Always():
                pass
            case Refused(instead):
                raise ConfigError(f"{name} is not a setting of pdserve: {instead}")
    return words


def _flag(name: str) -> str:
    return SHORT.get(name, "") or (name.removeprefix("--").replace("_", "-") if name.startswith("--") else "")
