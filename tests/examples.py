"""Says how many examples property tests try: a third of the full number, and at night thrice the full number."""

from __future__ import annotations

from hypothesis import settings

FULL = 100
"""The full number of examples of a property test that does not say how many it needs."""


def load_profiles() -> None:
    """Takes the profile ``few``, a third of the examples. ``make test-all`` gives ``many``, thrice the full number.

    An example has no deadline: how long it takes depends on what else the machine does.
    """
    settings.register_profile("few", settings(), max_examples=FULL // 3, deadline=None)
    settings.load_profile("few")
    settings.register_profile("many", settings(), max_examples=3 * FULL)


def examples(full: int) -> int:
    """Returns how many examples a test tries now whose full number is ``full``."""
    return full * settings().max_examples // FULL
