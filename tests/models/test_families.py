"""Tests each family's recipe: logits and tokens are those of transformers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from pdserve.config import Dtype
from pdserve.errors import ModelError
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.checkpoint.decoder_config import FamilyConfig
from pdserve.models.runner import ModelRunner, StepRow
from pdserve.models.table import FAMILIES, TEXT_PARTS
from pdserve.settings import cache_folder
from pdserve.wire.sampling_params import SamplingParams
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels, CompiledLinear
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.engine.test_step_loop import engine
from tests.models.greedy import small_runner
from tests.models.grouped_runner import GroupedRunner
from tests.models.rank_program import Case
from tests.models.test_tensor_parallel import computed
from tests.models.tiny_families import (
    CASES,
    LONG_ROPE,
    families_without_a_case,
    save_case,
    save_tiny,
    saved_tiny,
    text_part,
)
from tests.tiny_models import FAMILIES as OLDER
from tests.tiny_models import Reference, logits_of, random_prompt, reference_logits


@pytest.fixture(scope="module")
def compiled() -> CompiledKernels:
    return CompiledKernels(cache_folder(os.environ))


PROMPT = [(7 * i * i + 11 * i) % 509 + 3 for i in range(41)]
CHUNKS = (17, 3, 21)
TOKEN_BY_TOKEN = (*[1] * 9, 23, *[1] * 9)
"""Chunks of a token each, within windows and chosen tokens and past them, and past short contexts of frequencies."""


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_logit_is_that_of_transformers(tmp_path: Path, case: str) -> None:
    """The model is the one that transformers has saved. At night, it also loads what it has saved."""
    wanted = logits_of(saved_tiny(case, tmp_path), PROMPT)
    assert isinstance(read_decoder_config(tmp_path), FamilyConfig)
    tolerance = 2e-4 * float(wanted.abs().max())
    runner = small_runner(tmp_path)
    pieces: list[torch.Tensor] = []
    table, start = range(16), 0
    for size in CHUNKS:
        # Another request shares each step, so that rows are seen to be independent.
        other = StepRow(PROMPT[5:6], 0, range(16, 20), False)
        row = StepRow(PROMPT[start : start + size], start, table, True, range(size))
        runner.run([other, row], score=pieces.append)
        start += size
    found = torch.cat(pieces)
    assert wanted.std() > 0.04
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)
    pieces, start = [], 0
    for size in TOKEN_BY_TOKEN:
        runner.run(
            [StepRow(PROMPT[start : start + size], start, range(16, 32), True, range(size))], score=pieces.append
        )
        start += size
    torch.testing.assert_close(torch.cat(pieces), wanted, rtol=0, atol=tolerance)


LENGTHS = (1, 41, 211)
"""A prompt without a context, one longer than windows, and one of several chunks."""
ANSWER = 16
IN_AN_ENGINE = (
    "cohere2",
    "deepseek-v3",
    "deepseek-v4",
    "falcon-h1",
    "gemma4-shared",
    "gpt-oss",
    "gpt2",
    "jamba",
    "kimi-linear",
    "llama4",
    "nemotron-h",
    "phi3",
    "qwen3-5-moe",
)
"""Families of unlike parts and cache groups."""


@pytest.mark.integration
@pytest.mark.parametrize(
    "case",
    [
        *IN_AN_ENGINE,
        *(pytest.param(case, marks=pytest.mark.nightly) for case in sorted({*CASES, *OLDER} - {*IN_AN_ENGINE})),
    ],
)
def test_an_engine_gives_the_tokens_of_transformers(tmp_path: Path, case: str) -> None:
    """Prompts come at once, in chunks beside each other's answers, and find their prefixes the next time."""
    # A node takes the frequencies of long contexts for all prompts if it serves any.
    assert_engine_answers(save_case(case, tmp_path), LENGTHS[1:] if case == "phi3-long" else LENGTHS)


def assert_engine_answers(folder: Path, lengths: Sequence[int] = LENGTHS) -> None:
    """Asserts that an engine gives the tokens of transformers to prompts of these lengths, also from their prefixes."""
    prompts = [random_prompt(length, seed=length) for length in lengths]
    wanted = Reference(folder, ANSWER).clear_answers(prompts)
    assert len({token for answer in wanted for token in answer}) > ANSWER // 2
    greedy = SamplingParams(max_tokens=ANSWER, seed=0, temperature=0.0, ignore_eos=True)
    with engine(folder, overlap=False, num_blocks=200, max_len=256) as client:
        for _ in range(2):
            answers = client.together([(prompt, greedy, ()) for prompt in prompts])
            for answer, clear in zip(answers.values(), wanted, strict=True):
                assert answer.tokens[: len(clear)] == clear
        assert client.stats_asked_for(1).scheduler.cached_prompt_tokens > LENGTHS[-1] // 2


UNEVEN = ("falcon-h1", "gemma4-shared", "jamba", "qwen3-next-dense")
"""Numbers of gates, steps and inputs of a product that are no whole vectors."""


@pytest.mark.parametrize(
    "case", [*UNEVEN, *(pytest.param(case, marks=pytest.mark.nightly) for case in sorted(CASES.keys() - UNEVEN))]
)
def test_a_row_has_the_same_bits_beside_others_and_when_it_is_replayed(
    tmp_path: Path, compiled: CompiledKernels, case: str
) -> None:
    if not isinstance(compiled.linear(torch.zeros(32, 32)), CompiledLinear):
        pytest.skip("this CPU has no AVX2")
    folder = save_tiny(case, tmp_path)
    runner = GroupedRunner(folder, read_decoder_config(folder), Dtype.FP32, 4, 64, 128, compiled)
    table = range(16)

    def prompt() -> None:
        runner.run([StepRow(PROMPT[:11], 0, table, False)])

    def step(at: int, *others: int) -> torch.Tensor:
        beside = [StepRow([PROMPT[at + other]], at - 11, range(16 * other, 16 * other + 4), True) for other in others]
        return runner.run([*beside, StepRow([PROMPT[at]], at, table, True)])[-1]

    prompt()
    alone = torch.stack([step(at) for at in range(11, 20)])
    for others in [(1,), (1, 2), (1, 2, 3)]:
        prompt()
        assert torch.equal(torch.stack([step(at, *others) for at in range(11, 20)]), alone)
    prompt()
    assert torch.equal(runner.run([StepRow([PROMPT[at]], at, table, True) for at in range(11, 20)]), alone)


@pytest.mark.parametrize("length", [31, 32, 33, 41])
def test_frequencies_are_those_of_the_longest_context(tmp_path: Path, length: int) -> None:
    folder, original = save_tiny("phi3-long", tmp_path), LONG_ROPE["original_max_position_embeddings"]
    config = read_decoder_config(folder)
    assert config.turns_for_long_contexts(length) == (length > original)
    runner = ModelRunner(folder, config, Dtype.FP32, 4, 16, length, TorchKernels())
    pieces: list[torch.Tensor] = []
    for start in range(0, length, 20):
        part = PROMPT[start : min(start + 20, length)]
        runner.run([StepRow(part, start, range(16), True, range(len(part)))], score=pieces.append)
    wanted = reference_logits(folder, PROMPT[:length])
    torch.testing.assert_close(torch.cat(pieces), wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))


def switches(case: str) -> dict[str, bool]:
    """Returns the settings of a case's family that are on or off, each as the case does not have it."""
    family, settings = text_part(case)
    fields = msgspec.structs.fields((FAMILIES | TEXT_PARTS)[family])
    return {
        field.encode_name: not settings.get(field.encode_name, field.default)
        for field in fields
        if isinstance(field.default, bool) and field.encode_name in CONFIG_MAPPING[family]().to_dict()
    }


@pytest.mark.nightly
@pytest.mark.parametrize("case", sorted(CASES))
def test_no_switch_is_ignored(tmp_path: Path, case: str) -> None:
    for name, value in switches(case).items():
        try:
            folder = save_tiny(case, tmp_path / name, **{name: value})
        except (StrictDataclassError, NotImplementedError):
            # transformers does not have such a model, either.
            continue
        try:
            runner = small_runner(folder)
        except ModelError:
            continue
        wanted = reference_logits(folder, PROMPT)
        pieces: list[torch.Tensor] = []
        runner.run([StepRow(PROMPT, 0, range(16), True, range(len(PROMPT)))], score=pieces.append)
        torch.testing.assert_close(
            torch.cat(pieces), wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()), msg=partial("{}: {}".format, name)
        )


def test_a_kimi_linear_may_have_the_names_of_its_release(tmp_path: Path) -> None:
    """transformers gives the layer without experts another name than the released files have."""
    folder = save_tiny("kimi-linear", tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    names = {name: name.replace("layers.0.block_sparse_moe.", "layers.0.mlp.") for name in tensors}
    assert sum(name != other for name, other in names.items()) == 3
    row = [StepRow(PROMPT, 0, range(16), True)]
    wanted = small_runner(folder).run(row).clone()
    save_file({names[name]: tensor for name, tensor in tensors.items()}, file)
    torch.testing.assert_close(small_runner(folder).run(row), wanted, rtol=1e-4, atol=1e-4)


def test_a_hy4_may_have_other_names(tmp_path: Path) -> None:
    """transformers reads several names, and writes one of them."""
    folder = save_tiny("hy4", tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    renamed = (
        ("hc_pre.hc_head.", "hc_head."),
        ("hc_pre.hc_attn_layer.", "hc_attn_layer.hc_pre."),
        ("hc_pre.hc_mlp_layer.hc_", "ffn_hc."),
        ("linear_gate", "gate_proj"),
    )
    names = {}
    for name in tensors:
        found = [name.replace(stored, other) for stored, other in renamed if stored in name]
        names[name] = found[0] if found else name
    assert sum(name != other for name, other in names.items()) == 3 + 2 * 3 * 3 + 3 + 3
    row = [StepRow(PROMPT, 0, range(16), True)]
    wanted = small_runner(folder).run(row).clone()
    save_file({names[name]: tensor for name, tensor in tensors.items()} | {"model.mtp_layers.0.x": torch.ones(1)}, file)
    assert torch.equal(small_runner(folder).run(row), wanted)


def test_every_family_has_a_case() -> None:
    assert not families_without_a_case()


RANKED = (
    "apertus",
    "cohere-normed",
    "deepseek-v4",
    "falcon-groups",
    "falcon-h1",
    "gemma2",
    "gemma4",
    "gemma4-experts",
    "gemma4-shared",
    "glm4",
    "glm4-moe-groups",
    "gpt2",
    "gpt-oss",
    "granitemoe-shared",
    "granitemoehybrid",
    "jamba",
    "kimi-linear",
    "lfm2-moe",
    "llama4",
    "mamba2-groups",
    "minimax-m2",
    "ministral3",
    "nemotron-h",
    "olmo2",
    "phi3",
    "qwen3-5-moe",
    "qwen3-next",
    "trinity",
)
"""Permuted, fused, transposed and shared heads, norms of heads of each kind, experts in one tensor, what is learned."""


@pytest.mark.integration
@pytest.mark.parametrize(
    "cases",
    [RANKED, pytest.param(tuple(sorted(CASES)), marks=pytest.mark.nightly)],
    ids=["few", "all"],
)
def test_ranks_give_the_tokens_of_one_rank(tmp_path: Path, cases: tuple[str, ...]) -> None:
    folders = {case: save_tiny(case, tmp_path / case) for case in cases}
    prompts = [PROMPT[:6], PROMPT[3:20]]
    orders = [Case(str(folders[case]), size, prompts, 5) for case in cases for size in (1, 2)]
    results = computed(orders)
    for case, alone, split in zip(cases, results[::2], results[1::2], strict=True):
        assert not alone.error, case
        assert split == alone, case


@pytest.mark.integration
def test_an_odd_number_of_heads_of_one_group_is_not_split(tmp_path: Path) -> None:
    folder = save_tiny("granitemoehybrid", tmp_path, mamba_n_heads=15, mamba_d_head=8)
    (result,) = computed([Case(str(folder), 2, [PROMPT[:6]], 1)])
    assert "--tensor-parallel-size 2 does not divide the model's 1 heads of a state" in result.error
