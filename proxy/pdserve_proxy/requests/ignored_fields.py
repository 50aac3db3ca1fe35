"""Says in the log, once for each client, which fields of its requests have no effect. Few read a header of answers."""

from __future__ import annotations

import logging
from collections import OrderedDict

IGNORED_HEADER = "x-pdserve-ignored"
"""The header of an answer by which a node names the fields that it has ignored."""
MAX_CLIENTS = 1024
MAX_NAMES = 64
"""So many fields are named to one client."""

log = logging.getLogger(__name__)


class IgnoredFields:
    """What the log has said to whom. Of many clients, those that were told longest ago are forgotten."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, set[str]] = OrderedDict()

    def tell(self, client: str, label: str, names: str) -> None:
        """Logs those of ``names``, as the header has them, that ``client`` has not been told of."""
        told = self._told.setdefault(client, set())
        new = [name for name in names.split(",") if name not in told][: MAX_NAMES - len(told)]
        if not new:
            return
        told.update(new)
        self._told.move_to_end(client)
        while len(self._told) > MAX_CLIENTS:
            self._told.popitem(last=False)
        log.info("request_id=%s client=%s sends fields that have no effect: %s", label, client, ", ".join(new))
