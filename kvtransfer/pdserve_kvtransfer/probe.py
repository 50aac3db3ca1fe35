"""What travels on a probe's link: tags, sizes, bounds. Both ends hold scratch memory only."""

from __future__ import annotations

PING_TAG = 1
"""A few bytes, sent back as they are."""
START_TAG = 2
"""From the asker: now send."""
LOAD_TAG = 3
"""The messages that were asked for, by index."""

PING_BYTES = 8
MAX_ASKER_BYTES = 64
"""An asker sends nothing larger; what does ends the probe."""

PROBE_S = 10.0
"""A probe is over after this, whatever its asker does."""
PAUSE_S = 1.0
"""Between two probes, whoever asks."""
WINDOW = 32
"""Messages on the way at once."""
