"""Fills the dataclass tree of ``pdserve.config``: flags, then ``PDSERVE_*`` variables, then a TOML file, then defaults.

``load`` is the way in. ``sources`` finds values in the three places, ``setting`` lists a root's settings and reads
and writes single values, ``other_servers`` knows the flags of vLLM and SGLang, ``checks`` refuses settings that
contradict each other, and ``secret`` finds the cluster secret.
"""

from pdserve.settings.load import ROOTS, load, load_with_file, to_environ, with_current_names
from pdserve.settings.secret import is_loopback, resolve_secret
from pdserve.settings.sources import cache_folder, state_folder

__all__ = [
    "ROOTS",
    "cache_folder",
    "is_loopback",
    "load",
    "load_with_file",
    "resolve_secret",
    "state_folder",
    "to_environ",
    "with_current_names",
]
