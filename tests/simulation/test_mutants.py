"""The simulation finds defects: each mutant of the product breaks a promise within a few seeds."""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS, RARE, GoneLine, Mutant

pytestmark = pytest.mark.integration
NEARBY = 20
"""A change of the product moves what happens in a seed, so the ones that follow a mutant's own are tried too."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what)
def test_a_mutant_is_found(mutant: Mutant) -> None:
    _check(mutant, NEARBY)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mutant", RARE, ids=lambda mutant: mutant.what)
def test_a_rare_mutant_is_found(mutant: Mutant) -> None:
    _check(mutant, 20 * NEARBY)


def _check(mutant: Mutant, seeds: int) -> None:
    try:
        assert any(mutant.killed_by(mutant.seed + i) for i in range(seeds)), f"no seed finds that {mutant.what}"
    except GoneLine as exc:
        pytest.skip(f"the product has changed, and the mutant with it: {exc}")
