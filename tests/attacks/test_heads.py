"""Tests that a wrong head or framing gets an error or a closed connection, and that no other client notices."""

from __future__ import annotations

import pytest

from tests.attacks.attack import attacks, carry_out
from tests.attacks.case import HttpCase
from tests.attacks.heads import head_cases
from tests.attacks.target import Target

CASES = tuple(head_cases())


@pytest.mark.parametrize("case", attacks(CASES))
@pytest.mark.usefixtures("no_prompt_lost")
def test_a_head(attacked: Target, case: HttpCase) -> None:
    carry_out(attacked, case)
    attacked.attack_is_over()
