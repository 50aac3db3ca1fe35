"""Says how many examples property tests try: fewer in ``make check`` than in ``make test``, and more at night."""

from __future__ import annotations

from hypothesis import settings

USUAL = 100
"""A property test tries so many if it does not say how many."""


def load_profiles() -> None:
    """Takes the profile ``usual``. ``--hypothesis-profile`` takes another one.

    ``make check`` gives ``quick``, a third of the examples, and ``make test-all`` gives ``many``, thrice as many.

    An example has no deadline: how long it takes depends on what else the machine does.
    """
    settings.register_profile("usual", settings(), max_examples=USUAL, deadline=None)
    settings.load_profile("usual")
    settings.register_profile("quick", settings(), max_examples=USUAL // 3)
    settings.register_profile("many", settings(), max_examples=3 * USUAL)


def examples(usual: int) -> int:
    """Returns the number of examples for a test that tries ``usual`` in ``make test``."""
    return usual * settings().max_examples // USUAL
