"""Says once for each client which of its requests' fields have no effect, in the log that operators read."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

log = logging.getLogger(__name__)

MAX_CLIENTS = 1024
"""So many clients are remembered, those that had such fields last."""
MAX_FIELDS = 32
"""So many fields of one client are logged: a client may make up names without an end."""


class IgnoredFields:
    """The fields that were logged, by client."""

    def __init__(self) -> None:
        self._logged: OrderedDict[bytes, set[str]] = OrderedDict()

    def note(self, client: bytes, names: Sequence[str], request_id: str) -> None:
        """Logs those of ``names``, which are safe to print, that no request of ``client`` has had before."""
        if not names:
            return
        logged = self._logged.setdefault(client, set())
        self._logged.move_to_end(client)
        if len(self._logged) > MAX_CLIENTS:
            self._logged.popitem(last=False)
        new = [name for name in dict.fromkeys(names) if name not in logged][: MAX_FIELDS - len(logged)]
        if new:
            logged.update(new)
            log.warning(
                "request_id=%s has fields that have no effect here: %s. Later requests of this client with them are "
                "not logged",
                request_id,
                ", ".join(new),
            )
