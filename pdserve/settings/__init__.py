"""Fills the dataclass tree of ``pdserve.config``: flags, then ``PDSERVE_*`` variables, then a TOML file, then defaults.

``tree`` lists a root's settings, ``values`` reads and writes single values, ``sources`` finds them in the three places,
``ranges`` refuses what cannot work, ``secret`` finds the cluster secret, ``folders`` the user's own folders.
"""

from pdserve.settings.folders import cache_folder, state_folder
from pdserve.settings.load import ROOTS, load, load_with_file, to_environ
from pdserve.settings.secret import is_loopback, resolve_secret

__all__ = [
    "ROOTS",
    "cache_folder",
    "is_loopback",
    "load",
    "load_with_file",
    "resolve_secret",
    "state_folder",
    "to_environ",
]
