"""What SGLang's tests import, without SGLang: modules that stand in for those of its package.

The names that tests of a server need are written here, and the tests that several modules share come from the checkout.
All other names are absent.
"""

from __future__ import annotations

import sys
import unittest
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from absent_modules import AbsentFinder
from transformers import AutoTokenizer

KITS = "python/sglang/test/kits"
NO_PROCESS = SimpleNamespace(pid=0)


@dataclass(frozen=True)
class Target:
    """The server that the tests ask, the name of its model, and the folder that the tests lie in."""

    url: str
    model: str
    root: Path


class CustomTestCase(unittest.TestCase):
    """The base of SGLang's tests, which there repeats a test that fails. Here it does not."""


def install(target: Target, tokenizer: Path, absent_flags: dict[str, str]) -> None:
    """Puts the stand-ins where ``import`` finds them, before any test is imported.

    ``absent_flags`` says why a server with this flag of SGLang's is not there.
    """
    loaded = AutoTokenizer.from_pretrained(tokenizer)

    def popen_launch_server(_model: str, _url: str, *_rest: object, **options: Any) -> SimpleNamespace:
        command = " ".join(map(str, options.get("other_args") or ())).replace("=", " ") + " "
        for flag, reason in absent_flags.items():
            if flag + " " in command:
                pytest.skip(f"{flag}: {reason}")
        return NO_PROCESS

    test_utils = {
        "CustomTestCase": CustomTestCase,
        "popen_launch_server": popen_launch_server,
        "is_in_ci": _no,
        "is_in_amd_ci": _no,
        "is_rust_server_built": _no,
        "DEFAULT_URL_FOR_TEST": target.url,
        "DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH": 0,
        **dict.fromkeys(_MODELS, target.model),
    }
    registered = {f"register_{device}_ci": _nothing for device in ("amd", "cpu", "cuda", "npu", "xpu")}
    kits = {f"sglang.test.kits.{path.stem}": path for path in (target.root / KITS).glob("*.py")}
    given = {
        "sglang.srt.utils": {"kill_process_tree": _nothing},
        "sglang.srt.utils.hf_transformers_utils": {"get_tokenizer": lambda *_args, **_options: loaded},
        "sglang.test.test_utils": test_utils,
        "sglang.test.ci.ci_register": registered,
    }
    sys.meta_path.insert(0, AbsentFinder(("sglang",), given, kits))


_MODELS: Sequence[str] = (
    "DEFAULT_MODEL_NAME_FOR_TEST",
    "DEFAULT_SMALL_MODEL_NAME_FOR_TEST",
    "DEFAULT_SMALL_CROSS_ENCODER_MODEL_NAME_FOR_TEST",
)


def _nothing(*_args: object, **_options: object) -> None: ...


def _no() -> bool:
    return False
