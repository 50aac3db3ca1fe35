"""The simulation finds defects: each mutant of the product breaks a promise within a few seeds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.mutants import ALL, MUTANTS, RARE, GoneLine, Mutant

NEARBY = 20
"""A change of the product moves what happens in a seed, so the ones that follow a mutant's own are tried too."""


def test_every_mutant_still_applies() -> None:
    """Otherwise the product has changed, and the mutant has to follow it."""
    for mutant in ALL:
        with mutant.applied():
            pass


@pytest.mark.parametrize(
    "gone", [{"owner": "pdserve.gone.Gone"}, {"owner": "pdserve.errors.Gone"}, {"method": "gone"}, {"before": "gone"}]
)
def test_a_mutant_whose_place_is_gone_says_so(gone: dict[str, str]) -> None:
    with pytest.raises(GoneLine, match="any more"), replace(MUTANTS[0], **gone).applied():  # type: ignore[arg-type]
        pass


@pytest.mark.integration
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_mutant_is_found(mutant: Mutant) -> None:
    _check(mutant, NEARBY)


@pytest.mark.integration
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutant", RARE, ids=lambda mutant: mutant.what)
def test_a_rare_mutant_is_found(mutant: Mutant) -> None:
    _check(mutant, 20 * NEARBY)


def _check(mutant: Mutant, seeds: int) -> None:
    assert any(mutant.killed_by(mutant.seed + i) for i in range(seeds)), f"no seed finds that {mutant.what}"
