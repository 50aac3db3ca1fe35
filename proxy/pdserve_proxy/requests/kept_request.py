"""Reads from a request's headers whether its client may ask for the answer again, and what it has of the answer.

``Idempotency-Key`` names the answer. A client without one sends ``Last-Event-ID``: empty at first, so that events have
ids, and then the last id that it got. The owner of the API key and the request's body are part of the name.
"""

from __future__ import annotations

import re

from pdserve.errors import InvalidRequest
from pdserve.wire.ids import new_id
from pdserve.wire.kept_answer import digest, read_event_id
from pdserve.wire.ticket import Keep

MAX_KEY_CHARS = 255
KEY_HEADER = b"idempotency-key"
EVENT_HEADER = b"last-event-id"

_KEY = re.compile(rf"[\x20-\x7e]{{1,{MAX_KEY_CHARS}}}")


def wanted_keep(key: str | None, last_event: str | None, owner: str, path: str, body: bytes) -> Keep | None:
    """Returns how the answer is to be kept, or which one is asked for again; None if the headers say nothing of it.

    ``key`` and ``last_event`` are the values of the two headers. Raises InvalidRequest.
    """
    if key is None and last_event is None:
        return None
    if key is not None and _KEY.fullmatch(key) is None:
        raise InvalidRequest(
            f"'Idempotency-Key' takes 1 to {MAX_KEY_CHARS} printable characters of ASCII",
            code="invalid_idempotency_key",
        )
    seen = read_event_id(last_event) if last_event else None
    if last_event and seen is None:
        raise InvalidRequest(
            "'Last-Event-ID' has to be the id of an event of this answer, or empty", code="invalid_last_event_id"
        )
    owned = owner.encode(errors="replace")
    named = None if key is None else digest(b"key", owned, key.encode())
    if seen is not None and named not in (None, seen.key):
        raise InvalidRequest(
            "'Last-Event-ID' is of another answer than 'Idempotency-Key'", code="invalid_last_event_id"
        )
    answer = seen.key if seen is not None else named or new_id()
    after = seen.place if seen is not None else None
    return Keep(answer, digest(b"owner", owned), digest(path.encode(), body), after)
