"""Says how many examples property tests try: all in ``make test``, and a third of them in ``make check``."""

from __future__ import annotations

from hypothesis import settings

USUAL = 100
"""A property test tries so many if it does not say how many."""


def load_profiles() -> None:
    """Takes the profile ``usual``; ``--hypothesis-profile=quick``, which ``make check`` gives, takes the other one.

    An example has no deadline: how long it takes depends on what else the machine does.
    """
    settings.register_profile("usual", settings(), max_examples=USUAL, deadline=None)
    settings.load_profile("usual")
    settings.register_profile("quick", settings(), max_examples=USUAL // 3)


def examples(usual: int) -> int:
    """Returns the number of examples for a test that tries ``usual`` in ``make test``."""
    return usual * settings().max_examples // USUAL
