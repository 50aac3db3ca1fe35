"""Tests that a wrong body gets an error that says what is wrong, and that no other client notices."""

from __future__ import annotations

import pytest

from tests.attacks.attack import attacks, carry_out
from tests.attacks.bodies import body_cases
from tests.attacks.case import HttpCase
from tests.attacks.target import Target

CASES = tuple(body_cases())


@pytest.mark.parametrize("case", attacks(CASES))
@pytest.mark.usefixtures("no_prompt_lost")
def test_a_body(attacked: Target, case: HttpCase) -> None:
    carry_out(attacked, case)
    attacked.attack_is_over()
