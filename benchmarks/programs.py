"""The programs of this package that studies start, and the settings that pdserve's own programs get from them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from pdserve.settings import ROOTS
from pdserve.settings.setting import ENV_PREFIX, settings_of

_CHECKOUT = Path(__file__).parents[1]
_RUN = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def study_program(module: str, *args: str) -> tuple[str, ...]:
    """Returns the command that runs ``module`` of this checkout, in whatever folder it is started.

    The checkout comes last on the import path, where its folders hide no package.
    """
    return (sys.executable, "-P", "-c", _RUN, str(_CHECKOUT), module, *args)


def for_servers(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without the studies' own settings, which pdserve's programs would refuse."""
    known = {setting.env for root in ROOTS for setting in settings_of(root)}
    return {name: value for name, value in variables.items() if name in known or not name.startswith(ENV_PREFIX)}
