"""The label of a request that clients and logs see: ``x-request-id``. Never a key."""

from __future__ import annotations

import re
import uuid

REQUEST_ID_HEADER = "x-request-id"
_ACCEPTABLE = re.compile(r"[\x21-\x7e]{1,128}")


def request_label(given: str | None) -> str:
    """``given``, if it is fit for a header and a log line, or a new one."""
    return given if given and _ACCEPTABLE.fullmatch(given) else uuid.uuid4().hex
