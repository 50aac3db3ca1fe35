"""Every exception that pdserve raises on purpose.

    PdserveError
    ├── ConfigError             a setting is wrong; raised before anything starts
    ├── ModelError              a model folder cannot be read, or its architecture is not supported
    ├── HubError                the hub of models cannot be asked, or what it gives is not right
    ├── WireError               a message from another process is not acceptable
    │   ├── MalformedFrame          not the MessagePack that the channel expects
    │   │   └── UnreadableMessage       though this cluster made it: a newer or older pdserve
    │   └── AuthenticationFailed    wrong secret, replayed, or too old
    │       ├── WrongReceiver           made by this cluster, for another process
    │       └── StaleFrame              made by this cluster, for this process, and only too old
    ├── TransferError           the KV cache of a request did not arrive
    │   ├── HandshakeRefused        the two engines do not fit; names the field and both values
    │   └── PeerLost                the other engine died, restarted, or let its lease run out
    ├── GrammarRefused          a grammar cannot be compiled, or is too much work
    ├── EngineError             the engine process failed
    │   └── RankLost                a tensor-parallel rank died, failed or hangs
    ├── ClusterFailed           the cluster of pdserve.serve did not start, or ended by itself
    ├── BenchError              a benchmark could not be run
    ├── PlanError               a prediction has no profile, no load or no answer
    └── RequestError            a client's request ends with an HTTP error in OpenAI's shape
        ├── InvalidRequest          400
        ├── Unauthorized            401
        ├── Forbidden               403
        ├── NotFound                404
        ├── MethodNotAllowed        405
        ├── RequestTimeout          408
        ├── Gone                    410
        ├── PayloadTooLarge         413
        ├── UnsupportedMediaType    415
        ├── KeyReused               422
        ├── TooManyRequests         429, with Retry-After
        ├── Internal                500
        │   └── EngineGone          500, which a proxy takes for the node's loss
        ├── BadUpstream             502
        ├── Unavailable             503, with Retry-After
        └── DeadlineExceeded        504, not to be retried

Each exception of a library is translated where it enters pdserve, always with ``raise … from exc``.
"""

from __future__ import annotations

from typing import ClassVar

MAX_MESSAGE_CHARS = 2000
MAX_PARAM_CHARS = 256
"""The longest texts that a client gets with an error."""


def forget_frames(error: BaseException) -> None:
    """Drops what ``error`` has of the frames that it has passed, once it has been logged and answered.

    Those frames hold the request with its body, and the request, or one of them, often holds the error. Such a cycle
    would keep the body until Python looks for cycles, which happens seldom in a proxy.
    """
    error.__traceback__ = error.__cause__ = error.__context__ = None


class PdserveError(Exception):
    """The base class of all exceptions that pdserve raises itself."""


class ConfigError(PdserveError):
    """A setting is unknown, malformed or contradicts another."""


class ModelError(PdserveError):
    """A model cannot be loaded. The message says what is missing or not supported."""


class HubError(PdserveError):
    """A model cannot be fetched now: no network, a full disk, a hub with too much to do, spoilt bytes."""


class WireError(PdserveError):
    """A message from another process was dropped."""


class MalformedFrame(WireError):
    """The bytes are not the typed MessagePack that this channel carries."""


class UnreadableMessage(MalformedFrame):
    """A process of this cluster sent it, but it is not a message that this version of pdserve knows.

    ``sender`` is that process's boot id. ``body`` is the encoded message; empty if the frame does not name a receiver.
    """

    def __init__(self, message: str, sender: bytes, body: bytes) -> None:
        super().__init__(message)
        self.sender = sender
        self.body = body


class AuthenticationFailed(WireError):
    """The frame was not made with this cluster's secret, was seen before, or is too old."""


class ForgedFrame(AuthenticationFailed):
    """The frame was not made with this cluster's secret, or not all of it is as it was made."""


class WrongReceiver(AuthenticationFailed):
    """The frame was made in this cluster, but for another process. ``sender`` is the boot id of its maker."""

    def __init__(self, message: str, sender: bytes) -> None:
        super().__init__(message)
        self.sender = sender


class StaleFrame(AuthenticationFailed):
    """The frame is for this process and was never seen before, but is too old: a clock has jumped, or the way was long.

    Its sender, whose boot id is ``sender``, takes it for delivered.
    """

    def __init__(self, message: str, sender: bytes) -> None:
        super().__init__(message)
        self.sender = sender


class TransferError(PdserveError):
    """The KV cache of one request did not arrive. The request itself can still be served."""


_ADVICE = {
    "protocol": ": upgrade the older one",
    "fingerprint": ": they have other files of the model, and each node's log names its revision",
}


class HandshakeRefused(TransferError):
    """Two engines do not fit together.

    ``field`` is the first value that differs; ``ours`` and ``theirs`` are printed forms of both sides.
    """

    def __init__(self, field: str, ours: str, theirs: str) -> None:
        advice = _ADVICE.get(field, "")
        super().__init__(f"engines do not fit: {field} is {ours} here and {theirs} there{advice}")
        self.field = field
        self.ours = ours
        self.theirs = theirs


class SpoiltMessage(TransferError):
    """What came from the other engine is not what that has sent: something between the two changes it."""


class PeerLost(TransferError):
    """The other engine died, restarted under a new boot id, or stopped answering."""


class GrammarRefused(PdserveError):
    """A grammar cannot be compiled, or only with more work than is allowed. The message says where and why."""


class EngineError(PdserveError):
    """The engine process could not start, or died."""


class RankLost(EngineError):
    """A tensor-parallel rank died, failed or hangs: the engine cannot go on. ``ranks`` are those that gave no sign."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks

    @classmethod
    def silent(cls, ranks: tuple[int, ...], timeout_s: float) -> RankLost:
        """Returns the error for ``ranks``, one of which made the others wait for longer than ``timeout_s``."""
        names = ", ".join(map(str, ranks))
        who = f"one of the tensor-parallel ranks {names}" if len(ranks) > 1 else f"tensor-parallel rank {names}"
        return cls(f"{who} hangs: no sign of it for {timeout_s:.1f} s", ranks)


class ClusterFailed(PdserveError):
    """The cluster of ``pdserve.serve`` did not start in time, or ended by itself. The message has its last lines."""


class BenchError(PdserveError):
    """A benchmark cannot be run: the server, the report or the machine is not fit for it."""


class PlanError(PdserveError):
    """Nothing can be predicted: the profile, the load or the targets are not fit for it."""


class RequestError(PdserveError):
    """Ends one client request with an HTTP status and an OpenAI-shaped error body."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        # It may quote what the client has sent, and would be as large in the answer and in logs.
        self.message = message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}…"
        super().__init__(self.message)
        self.param = None if param is None else param[:MAX_PARAM_CHARS]
        self.code = code
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    status = 400
    type = "invalid_request_error"


class Unauthorized(RequestError):
    status = 401
    type = "authentication_error"


class Forbidden(RequestError):
    status = 403
    type = "permission_error"


class NotFound(RequestError):
    status = 404
    type = "not_found_error"


class MethodNotAllowed(RequestError):
    status = 405
    type = "invalid_request_error"


class RequestTimeout(RequestError):
    """The client did not send its request in time."""

    status = 408
    type = "invalid_request_error"


class PayloadTooLarge(RequestError):
    status = 413
    type = "invalid_request_error"


class UnsupportedMediaType(RequestError):
    status = 415
    type = "invalid_request_error"


class Gone(RequestError):
    """What the client asks for was here, or may have been, and is not stored any more."""

    status = 410
    type = "not_found_error"


class KeyReused(RequestError):
    """The client has sent another request with the same idempotency key."""

    status = 422
    type = "invalid_request_error"


class PrefillLost(RequestError):
    """A node gives a request back to the proxy, because the prefill node ``param`` was lost with it.

    No client sees it: the proxy has another node try, or says how many nodes were lost.
    """

    status = 424
    type = "server_error"


class TooManyRequests(RequestError):
    status = 429
    type = "rate_limit_error"


class Internal(RequestError):
    status = 500
    type = "server_error"


class EngineGone(Internal):
    """The engine of the node that was to answer has died or failed. A proxy takes the node for lost."""


class BadUpstream(RequestError):
    status = 502
    type = "server_error"


class Unavailable(RequestError):
    status = 503
    type = "service_unavailable"


class DeadlineExceeded(RequestError):
    status = 504
    type = "timeout_error"
