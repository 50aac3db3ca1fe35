"""Writes ``docs/reference/models.md`` from the families and their tests: ``python -m tests.docs.models_page``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdserve.models.checkpoint.safetensors.quantisation import FORMS, METHODS, Form
from pdserve.models.served import FORMATS_NOT_YET, NOT_YET, ServedFamily, served_families
from pdserve.models.table import COMPOSITES, FAMILIES
from tests.cluster import test_families, test_mtp
from tests.models import test_composites, test_tensor_parallel
from tests.models import test_families as harness
from tests.models.tiny_families import CASES
from tests.tiny_models import FALLBACK
from tests.tiny_models import FAMILIES as OLDER

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"

_HEAD = """# Families

A model belongs to the family that `model_type` in its `config.json` names. `pdserve models --families` prints this
table, `pdserve models --json` has it for programs, and `pdserve models org/name` says whether one model can be served.
[Choose a model](../how-to/models.md) explains the rest.

Prefill, decode and mixed nodes serve all families of the table, on CPUs and GPUs, with one rank or several, as folders
in fp32, bf16 or [quantised](#quantised-weights), and as GGUF files of the architecture in the column *GGUF*. The parts
are those with the settings that a `config.json` leaves out. It may choose others, such as windows.

DeepSeek V4, Qwen 4 Exp and MiniMax M3 have no attention kernels of their own yet. On a GPU, plain products of torch
compute or choose what they attend to, in steps that are not recorded: that is slower than it could be, and no GPU has
run it so far. No GPU has run Hy 4 or GLM 5.3 (`glm5_next`), either: torch computes their residuals, and the steps of
GLM 5.3 are not recorded. Layers of these families that draft tokens are not loaded. Each KV head of a MiniMax M3 keeps
the index key of a token, so that its cache has 1.5 times the numbers of keys and values. Files of a Qwen 4 Exp have to
say how many blocks of tokens its attention chooses, and may name layers before which vectors of hashed n-grams are
added to the residuals: the table has neither.

The last column says how tests compare a family with transformers. *Logits*: each one, in chunks, beside another request
and token by token. *Engine*: an engine gives the tokens of `generate` to prompts of 1, 41 and 211 tokens that come at
once, and again when it finds their prefixes. *Ranks*: two ranks give the tokens of one. *P/D*: a cluster of real
processes gives the tokens of `generate`, with one prefill rank and decode nodes of one and two, of which one is killed
in the middle of an answer. A change has to pass the bold ones, and the others run every night.
`python -m tests.docs.models_page` writes this page.
"""

_QUANTISED = """Folders of all families above may have quantised weights, as `quantization_config` in `config.json` says
(MLX: `quantization`; ModelOpt: also `hf_quant_config.json`). Other methods and forms are refused by their names before
a weight is read, and so are tensors that do not fit what is said.

On a GPU, and on a CPU with `g++`, weights become blocks with `--dtype bf16`, and products are computed from these: a
GPU takes their numbers out of the codes as it reads them, and its memory holds the codes and their scales. Elsewhere
(plain torch, `--dtype fp32`, `--weights dequantise`) they are dequantised into `--dtype` while they load, and then take
the memory of a model in `--dtype`. Ranks read their shares; a share that cuts a block is dequantised, and so are
routers and the heads' own products of latent attention. Errors below are the ratios of root mean squares for normally
distributed weights.

GPUs since sm_89 (Ada, Hopper, Blackwell) multiply FP8 by FP8: 128 inputs of a row are rounded together, by a scale of
their own, whatever scheme the configuration has. That is finer than a scale for each row or for all, and rows are
rounded alike in steps of any size. Weights whose inputs, or a rank's share of them, are no whole 128s are multiplied
with inputs as they are. `--weights dequantise` rounds no inputs. Other activations are never rounded, and the KV
cache has `--dtype`; tensors for that (`input_scale`, `k_scale`, …) are known by their names and unused.
"""

_TABLE = """| family | models | attention | feed-forward part | norms | positions | GGUF | proof |
|---|---|---|---|---|---|---|---|"""


def render() -> str:
    """Returns the whole page."""
    rows = [_row(family) for family in served_families()]
    others = ", ".join(f"`{config.model_type}`" for config in FALLBACK.values())
    missing = [f"| {each} | {_named(each)} |" for each in dict.fromkeys(NOT_YET.values())]
    return "\n".join(
        [
            _HEAD,
            _TABLE,
            *rows,
            "",
            "## Layers that draft tokens",
            "",
            "Folders may have the weights of a layer behind the last one that drafts tokens (MTP). These families can",
            f"load it: {_drafting()}.",
            "",
            "## Quantised weights",
            "",
            _QUANTISED,
            "| `quant_method` | read | refused |",
            "|---|---|---|",
            *(f"| `{method}` | {read} | {refused} |" for method, (read, refused) in METHODS.items()),
            "",
            "| a weight's form | on a CPU | what that does | on a GPU | what that does |",
            "|---|---|---|---|---|",
            *(_form(form) for form in Form),
            "",
            "## Text parts",
            "",
            "These models take images or sounds, too, and are served with their text part, if it is one above:",
            f"{', '.join(f'`{name}`' for name in sorted(COMPOSITES))}.",
            "",
            "## Others",
            "",
            "Transformers' code computes other decoders, if it follows transformers' attention interface: as folders,",
            f"with one rank. Each is checked when it is loaded. The tests have {others}.",
            "",
            "## Not yet",
            "",
            "| what pdserve lacks | families |",
            "|---|---|",
            *missing,
            f"| weights in folders in {', '.join(FORMATS_NOT_YET)} | |",
            "",
        ]
    )


def _drafting() -> str:
    return ", ".join(f"`{name}`" for name, family in sorted(FAMILIES.items()) if family().recipe().draft is not None)


def _form(form: Form) -> str:
    cells = [form.value]
    for becomes in (FORMS[form].cpu, FORMS[form].gpu):
        cells += [f"{becomes.blocks} blocks, {becomes.bits:g} bits" if becomes.blocks else "dequantised", becomes.why]
    return f"| {' | '.join(cells)} |"


def _named(missing: str) -> str:
    return ", ".join(f"`{name}`" for name, lacks in NOT_YET.items() if lacks == missing)


def _row(family: ServedFamily) -> str:
    gguf = ", ".join(f"`{form.removeprefix('GGUF ')}`" for form in family.formats if form.startswith("GGUF "))
    cells = (f"`{family.model_type}`", family.models, *family.parts, gguf, ", ".join(_proof(family.model_type)))
    return f"| {' | '.join(cells)} |"


def _proof(model_type: str) -> Iterator[str]:
    cases = {case for case, (family, _) in CASES.items() if family == model_type}
    cases |= {case for case, config in OLDER.items() if config.model_type == model_type}
    cases |= {case for case, (whole, *_) in test_composites.CASES.items() if whole == model_type}
    yield "**logits**"
    for name, tests in (("engine", _ENGINES), ("ranks", _RANKS), ("P/D", _CLUSTERS)):
        found = {case: always for test in tests for case, always in _tested(test).items()}
        found |= {case: True for case in OLDER if name == "ranks" and case in test_tensor_parallel.FAMILIES}
        found |= {"llama": True}  # Most tests of engines, ranks and clusters serve it.
        if cases & found.keys():
            yield f"**{name}**" if any(found.get(case) for case in cases) else name


_ENGINES = (
    harness.test_an_engine_gives_the_tokens_of_transformers,
    test_composites.test_an_engine_gives_the_tokens_of_transformers,
)
_RANKS = (harness.test_ranks_give_the_tokens_of_one_rank, test_composites.test_two_ranks_give_the_tokens_of_one)
_CLUSTERS = (
    test_families.test_unlike_ranks_and_a_lost_node_give_the_tokens_of_transformers,
    test_mtp.test_nobody_can_tell_on_which_side_the_layer_drafts,
)


def _tested(test: Any) -> dict[str, bool]:
    """Returns the cases that a test has as its parameters, and whether it has them in ``make test``."""
    found: dict[str, bool] = {}
    at_night = any(mark.name == "nightly" for mark in test.pytestmark)
    for mark in test.pytestmark:
        for given in mark.args[1] if mark.name == "parametrize" else ():
            marks, values = (given.marks, given.values) if hasattr(given, "marks") else ((), (given,))
            always = not at_night and all(each.name != "nightly" for each in marks)
            for value in values:
                for given_case in (value,) if isinstance(value, str) else value:
                    found[given_case] = found.get(given_case, False) or always
    return found


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
