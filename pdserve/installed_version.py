"""The version of pdserve that is installed here."""

from __future__ import annotations

import importlib.metadata
from typing import Final

INSTALLED_VERSION: Final = importlib.metadata.version("pdserve")
