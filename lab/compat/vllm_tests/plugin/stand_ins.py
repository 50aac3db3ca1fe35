"""What vLLM's tests import, without vLLM: modules that stand in for ``vllm`` and for the tests' own ``tests.utils``.

Most names of vLLM that these tests import are needed by tests of vLLM's insides alone, and are absent. The few names
that tests of a server need are written here.
"""

from __future__ import annotations

import json
import socket
import sys
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest
from absent_modules import AbsentFinder, AbsentModule
from transformers import AutoTokenizer

CLIENT_TIMEOUT_S = 600.0

ABSENT_PACKAGES = ("vllm", "torch", "fastapi")
"""These packages are not installed here. Only tests of vLLM's insides use torch and FastAPI."""


@dataclass(frozen=True)
class Target:
    """The server that the tests ask, and the folder with its tokeniser."""

    url: str
    tokenizer: Path


class _Platform:
    """vLLM's ``current_platform`` of a machine without any GPU."""

    def is_rocm(self) -> bool:
        return False

    def is_cuda(self) -> bool:
        return False

    def is_xpu(self) -> bool:
        return False

    def is_cpu(self) -> bool:
        return True

    def device_count(self) -> int:
        return 0

    def supports_fp8(self) -> bool:
        return False


class _Hub:
    """The model hub. Adapters are never downloaded: a test that asks for one gets the server's own answer."""

    def snapshot_download(self, *_args: object, **_kwargs: object) -> str:
        return ""


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _version(url: str) -> str:
    """Returns the server's version: the tests compare it with vLLM's own."""
    with urllib.request.urlopen(f"{url}/version", timeout=CLIENT_TIMEOUT_S) as response:
        version: str = json.load(response)["version"]
        return version


def _unchanged(function: Callable[..., object]) -> Callable[..., object]:
    return function


def _decorator(*_args: object, **_kwargs: object) -> Callable[[Callable[..., object]], Callable[..., object]]:
    return _unchanged


def install(target: Target, absent_flags: dict[str, str]) -> None:
    """Puts the stand-ins where ``import`` finds them, before any test is imported.

    ``absent_flags`` says why a server with this flag of vLLM's is not there.
    """
    loaded = AutoTokenizer.from_pretrained(target.tokenizer)

    def get_tokenizer(*_args: object, **_kwargs: object) -> Any:
        return loaded

    class ModelConfig:
        def __init__(self, *_args: object, **_kwargs: object) -> None: ...

        def get_vocab_size(self) -> int:
            return len(loaded)

    class RemoteOpenAIServer:
        """The running cluster, behind the methods of the class of this name in vLLM's tests."""

        DUMMY_API_KEY = "token-abc123"
        uds = None
        show_hidden_metrics = False

        def __init__(self, _model: str, args: Sequence[str], **_more: object) -> None:
            command = " ".join(args).replace("=", " ") + " "
            for flag, reason in absent_flags.items():
                if flag + " " in command:
                    pytest.skip(f"{flag}: {reason}")
            self.url_root = target.url
            host, _, port = target.url.rpartition("/")[2].partition(":")
            self.host, self.port = host, int(port)

        def __enter__(self) -> RemoteOpenAIServer:
            return self

        def __exit__(self, *_error: object) -> None: ...

        def url_for(self, *parts: str) -> str:
            return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

        def get_client(self, **options: Any) -> openai.OpenAI:
            return openai.OpenAI(base_url=self.url_for("v1"), **_client_options(options))

        def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
            return openai.AsyncOpenAI(base_url=self.url_for("v1"), **_client_options(options))

        def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
            return anthropic.Anthropic(base_url=self.url_root, **_client_options(options))

        def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
            return anthropic.AsyncAnthropic(base_url=self.url_root, **_client_options(options))

    def _client_options(options: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": RemoteOpenAIServer.DUMMY_API_KEY, "timeout": CLIENT_TIMEOUT_S, "max_retries": 0} | options

    environment: dict[str, object] = {"VLLM_USE_RUST_FRONTEND": False}
    given: dict[str, dict[str, object]] = {
        "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
        "vllm.config": {"ModelConfig": ModelConfig},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.transformers_utils.repo_utils": {"hf_api": _Hub},
        "vllm.utils.network_utils": {"get_open_port": _free_port},
        "vllm.version": {"__version__": _version(target.url)},
        "vllm": {"envs": SimpleNamespace(**environment)},
        "vllm.envs": environment,
        "torch": {"long": "int64", "iinfo": lambda _: SimpleNamespace(min=-(2**63), max=2**63 - 1)},
    }
    sys.meta_path.insert(0, AbsentFinder(ABSENT_PACKAGES, given))
    utils = AbsentModule("tests.utils")
    vars(utils).update(
        RemoteOpenAIServer=RemoteOpenAIServer,
        ROCM_EXTRA_ARGS=[],
        ROCM_ENV_OVERRIDES={},
        VLLM_PATH=Path(),
        multi_gpu_only=_decorator,
        requires_fp8=_unchanged,
        create_new_process_for_each_test=_decorator,
    )
    sys.modules["tests.utils"] = utils
    sys.modules["tests.conftest"] = AbsentModule("tests.conftest")
