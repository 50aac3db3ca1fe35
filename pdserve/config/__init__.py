"""The one typed tree of settings. It is frozen, read once at the edge and passed down; names contain their units.

Each module has the sections of one subject, and this package has the names of all. ``pdserve.settings.load`` fills the
tree from flags, ``PDSERVE_*`` variables and a TOML file; no other module of pdserve reads the environment.
"""

from __future__ import annotations

from pdserve.config.commands import *
from pdserve.config.declare import *
from pdserve.config.engine import *
from pdserve.config.http import *
from pdserve.config.model import *
from pdserve.config.node import *
from pdserve.config.observability import *
from pdserve.config.proxy import *
from pdserve.config.requests import *
from pdserve.config.transfer import *
