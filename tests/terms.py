"""Terms of requests, made of single values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.control.journal import DIGEST_BYTES
from pdserve.wire.terms import PromptTerms, Resume, Terms, Ticket

if TYPE_CHECKING:
    from pdserve.engine.request import Request

PREPARE = Resume(0, bytes(DIGEST_BYTES), prepare=True)
"""With it, an engine only fetches."""


def made_terms(deadline_s: float = 60.0, **fields: Any) -> Terms:
    """Returns terms with these fields, those of ``PromptTerms`` among them."""
    prompt = {name: fields.pop(name) for name in PromptTerms.__struct_fields__ if name in fields}
    return Terms(prompt=PromptTerms(**prompt), deadline_s=deadline_s, **fields)


def made_ticket(node: bytes, attempt: int = 0, **fields: Any) -> Ticket:
    """Returns a ticket for ``node`` whose terms have these fields."""
    return Ticket(attempt=attempt, node=node, terms=made_terms(**{"request_id": "r", **fields}))


def change_terms(request: Request, **fields: Any) -> None:
    """Gives a request terms that differ in these fields."""
    known = msgspec.structs.asdict(request.terms.prompt) | msgspec.structs.asdict(request.terms)
    del known["prompt"]
    request.terms = made_terms(**(known | fields))
