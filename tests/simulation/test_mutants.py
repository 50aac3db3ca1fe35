"""The simulation finds defects: each mutant of the product breaks a promise within a few seeds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lab.simulation.defects.mutants import ALL, MUTANTS, RARE, GoneLine, Mutant
from lab.simulation.defects.put_back import PUT_BACK
from tests.simulation.test_ranks import CLEARS_LATE
from tests.simulation.test_workers import NOTICED

PAGE = Path(__file__).parents[2] / "docs" / "simulation.md"
IN_EVERY_TEST_RUN = {
    "digests are not compared",
    "the prefix cache forgets the salt",
    "the holders of a shared block are not counted",
    "a cancelled push keeps its blocks",
    "a lease is compared the wrong way",
    "a ticket is taken twice",
    "a request that has ended counts as under way",
    "an offered upgrade turns a body into the next request",
    "a client that has closed its half gets no answer",
    "two busy nodes turn a request away while a third is free",
    "a connection that has ended takes the next one with its number along",
    "a wrong draft is accepted",
}
"""Some for each part of the product. The others are looked for at night."""
NEARBY = 20
"""A change of the product moves what happens in a seed, so the ones that follow a mutant's own are tried too."""


def _cases(mutants: Sequence[Mutant]) -> list[object]:
    return [
        pytest.param(mutant, id=mutant.what, marks=() if mutant.what in IN_EVERY_TEST_RUN else pytest.mark.nightly)
        for mutant in mutants
    ]


def test_every_mutant_of_each_test_run_is_there() -> None:
    assert {mutant.what for mutant in (*MUTANTS, *PUT_BACK)} >= IN_EVERY_TEST_RUN


def test_every_mutant_still_applies() -> None:
    """Otherwise the product has changed, and the mutant has to follow it."""
    for mutant in (*ALL, *PUT_BACK):
        with mutant.applied():
            pass


def test_the_page_has_every_defect_that_was_put_back() -> None:
    """With the seed that finds it. Every other one is said to be outside, or to have a plan of its own."""
    _, _, part = PAGE.read_text().partition("## Defects of an attack, put back\n")
    rows = [line.strip("| ").split(" | ") for line in part.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    told = [answer for point, _, answer in rows if point.isdigit()]
    assert len(told) == len(rows) - 1
    found = [(int(match[1]), match[2]) for answer in told if (match := re.fullmatch(r"seed (\d+): (.+)", answer))]
    assert sorted(found) == sorted((mutant.seed, mutant.what) for mutant in PUT_BACK)
    with_plans = {"test_ranks.py": {CLEARS_LATE.what}, "test_workers.py": {noticed.mutant.what for noticed in NOTICED}}
    for answer in told:
        if planned := re.fullmatch(r"a plan of its own, in `(.+)`: (.+)", answer):
            assert planned[2] in with_plans[planned[1]]
        else:
            assert answer.startswith(("seed ", "outside: "))
    assert any(CLEARS_LATE.what in answer for answer in told)


@pytest.mark.parametrize(
    "gone", [{"owner": "pdserve.gone.Gone"}, {"owner": "pdserve.errors.Gone"}, {"method": "gone"}, {"before": "gone"}]
)
def test_a_mutant_whose_place_is_gone_says_so(gone: dict[str, str]) -> None:
    with pytest.raises(GoneLine, match="any more"), replace(MUTANTS[0], **gone).applied():  # type: ignore[arg-type]
        pass


@pytest.mark.integration
@pytest.mark.parametrize("mutant", _cases(MUTANTS))
def test_a_mutant_is_found(mutant: Mutant) -> None:
    _check(mutant, NEARBY)


@pytest.mark.integration
@pytest.mark.parametrize("mutant", _cases(PUT_BACK))
def test_a_defect_that_was_put_back_is_found(mutant: Mutant) -> None:
    _check(mutant, NEARBY)


@pytest.mark.integration
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutant", RARE, ids=lambda mutant: mutant.what)
def test_a_rare_mutant_is_found(mutant: Mutant) -> None:
    _check(mutant, 20 * NEARBY)


def _check(mutant: Mutant, seeds: int) -> None:
    assert any(mutant.killed_by(mutant.seed + i) for i in range(seeds)), f"no seed finds that {mutant.what}"
