"""Tests that an engine's torch lacks what it never uses, and computes every kind of model as a whole torch does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from gguf import GGMLQuantizationType

from pdserve.settings import cache_folder
from tests.models.lean_program import Case, Order, Results, answer, special_tokens
from tests.nightly import nightly
from tests.processes import lean_torch_command
from tests.tiny_gguf import save_tiny_gguf
from tests.tiny_models import FALLBACK, FAMILIES, save_tiny_model

pytestmark = pytest.mark.integration

PROGRAM = """
import importlib.util, sys
from pdserve.models.lean_torch import import_torch
import_torch()
import torch
print("torch._meta_registrations" in sys.modules, hasattr(torch, "_meta_registrations"), "cuda" in sys.modules)
importlib.util.find_spec("cuda")  # fails for what an import cannot find for good
print((torch.ones(2, 3) @ torch.ones(3, 2)).tolist())
import torch._meta_registrations
print(torch.linalg.inv_ex(torch.empty(2, 2, device="meta")).inverse.shape)
"""


def test_the_part_for_tensors_without_memory_comes_when_it_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False False False", "[[3.0, 3.0], [3.0, 3.0]]", "torch.Size([2, 2])"]


STORED = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
LONGEST_S = 900
"""This is many times what every module alone takes: only a process that hangs should end here."""
WIDTHS = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}


@pytest.fixture(scope="module", params=["one set each", nightly("both sets")])
def cases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Returns every family that has a decoder here, every format of a GGUF file, and models of transformers.

    In every run, each is computed by one of the two kernel sets, in turn.
    """
    root = tmp_path_factory.mktemp("models")
    both = request.param == "both sets"
    llama = save_tiny_model("llama", root / "of-gguf", **WIDTHS)
    files = [
        save_tiny_gguf(llama, root / f"{kind}.gguf", quantized=GGMLQuantizationType[kind], widths=(64, 96))
        for kind in STORED
    ]
    native = [save_tiny_model(family, root / family) for family in sorted(FAMILIES)]
    others = [save_tiny_model(family, root / family) for family in sorted(FALLBACK)]
    return [
        *(
            Case(str(path), compiled)
            for place, path in enumerate((*files, *native))
            for compiled in (False, True)
            if both or compiled == bool(place % 2)
        ),
        # The last ones, because they complete the process's torch.
        *(Case(str(path), False) for path in others),
    ]


def computed(order: Order, timeout_s: float = 240) -> Results:
    """Returns what a process with the torch of an engine makes of an order."""
    done = subprocess.run(
        lean_torch_command("tests.models.lean_program", str(cache_folder(os.environ))),
        input=msgspec.json.encode(order),
        stdout=subprocess.PIPE,
        check=True,
        timeout=timeout_s,
    )
    return msgspec.json.decode(done.stdout, type=Results)


@pytest.mark.nightly
@pytest.mark.timeout(LONGEST_S + 30)
def test_every_module_can_be_the_first_in_an_engines_torch() -> None:
    assert not computed(Order([], each_first=True), LONGEST_S).unimportable


def test_every_module_and_every_kind_of_model_runs_in_an_engines_torch(cases: list[Case]) -> None:
    cache = cache_folder(os.environ)
    found = computed(Order(cases, each_first=False))
    assert not found.unimportable
    assert found.special_tokens == special_tokens()
    assert found.tokens == [answer(case, Path(cache)) for case in cases]
