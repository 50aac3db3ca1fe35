"""The structs and frames of pdserve 0.1 for messages between hosts, as they were.

They are kept beside today's so that tests can play a host that is not upgraded yet. They never change. The next minor
release gets a file of its own.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import struct
import time
from typing import Annotated, Any, TypeAlias

import msgspec

PROTOCOL_VERSION = 5
FRAME_VERSION = 1
MAX_AGE_S = 60.0

# ------------------------------------------------------------ frame


class Frame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    version: int
    sender: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    counter: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    sent_ms: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    body: bytes
    mac: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


def _mac(secret: bytes, purpose: bytes, sender: bytes, counter: int, sent_ms: int, body: bytes) -> bytes:
    signed = purpose + b"\0" + struct.pack(">B16sQQ", FRAME_VERSION, sender, counter, sent_ms) + body
    return hmac.digest(secret, signed, hashlib.sha256)


class Sealer:
    def __init__(self, secret: bytes, purpose: bytes, sender: bytes) -> None:
        self._secret, self._purpose, self._sender = secret, purpose, sender
        self._counter = 0

    def seal(self, message: msgspec.Struct) -> bytes:
        self._counter += 1
        sent_ms, body = int(time.time() * 1000), msgspec.msgpack.encode(message)
        mac = _mac(self._secret, self._purpose, self._sender, self._counter, sent_ms, body)
        return msgspec.msgpack.encode(Frame(FRAME_VERSION, self._sender, self._counter, sent_ms, body, mac))


class Refusal(Exception):
    """pdserve 0.1 drops a frame for which this is raised."""


class Opener:
    def __init__(self, secret: bytes, purpose: bytes, message: Any, *, ordered: bool = True) -> None:
        self._secret, self._purpose, self._ordered = secret, purpose, ordered
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(message)
        self._counters: dict[bytes, int] = {}

    def open(self, frame: bytes) -> Any:
        try:
            outer = msgspec.msgpack.decode(frame, type=Frame)
        except (msgspec.DecodeError, msgspec.ValidationError) as exc:
            raise Refusal(f"not a pdserve frame: {exc}") from exc
        if outer.version != FRAME_VERSION:
            raise Refusal(f"frame version {outer.version}; this process speaks {FRAME_VERSION}")
        mac = _mac(self._secret, self._purpose, outer.sender, outer.counter, outer.sent_ms, outer.body)
        if not hmac.compare_digest(mac, outer.mac):
            raise Refusal("wrong signature")
        try:
            message = self._decoder.decode(outer.body)
        except (msgspec.DecodeError, msgspec.ValidationError) as exc:
            raise Refusal(f"unexpected message: {exc}") from exc
        if abs(time.time() - outer.sent_ms / 1000) > MAX_AGE_S:
            raise Refusal("too old")
        if self._ordered and outer.counter <= self._counters.get(outer.sender, 0):
            raise Refusal("replayed frame")
        self._counters[outer.sender] = outer.counter
        return message


# ------------------------------------------------------------ ids

BootId: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
RequestUuid: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class TransferId(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    request: RequestUuid
    attempt: Annotated[int, msgspec.Meta(ge=0, le=1000)]
    decode_boot: BootId

    def __str__(self) -> str:
        return f"{self.request.hex()[:12]}/{self.attempt}"


# ------------------------------------------------------------ sampling


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    temperature: Annotated[float, msgspec.Meta(ge=0.0)] = 1.0
    top_p: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, msgspec.Meta(ge=0)] = 0
    min_p: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0.0)] = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[Annotated[tuple[int, ...], msgspec.Meta(min_length=1)], ...] = ()
    logprobs: Annotated[int, msgspec.Meta(ge=0)] | None = None


class TokenLogprobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    chosen: float
    rank: int
    top: tuple[tuple[int, float], ...]


class SampledToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    token_id: int
    logprobs: TokenLogprobs | None = None


# ------------------------------------------------------------ discovery

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]


class Role(enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"


class Capacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_running: int
    num_blocks: int
    block_size: int
    max_model_len: int


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    running: int = 0
    waiting: int = 0
    free_blocks: int = 0


class NodeInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: Text
    boot_id: BootId
    role: Role
    url: Text
    control: Text
    model: Text
    fingerprint: Text
    capacity: Capacity


class Register(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="register"):
    node: NodeInfo


class Heartbeat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="heartbeat"):
    boot_id: BootId
    load: Load


class Deregister(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="deregister"):
    boot_id: BootId


class Ack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ack"):
    boot_id: BootId
    known: bool


ToProxy: TypeAlias = Register | Heartbeat | Deregister

# ------------------------------------------------------------ ticket

TICKET_HEADER = "x-pdserve-ticket"
MAX_DEADLINE_S = 86400.0


class PrefillTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(max_length=512)]
    control: Annotated[str, msgspec.Meta(max_length=512)]
    boot_id: BootId


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    request_id: Annotated[str, msgspec.Meta(max_length=128)]
    attempt: Annotated[int, msgspec.Meta(ge=0, le=1000)]
    node: BootId
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_S)]
    prefill: tuple[PrefillTarget, ...] = ()


# ------------------------------------------------------------ link_address

LABEL_BITS = 63
CELLS = 512
LinkNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]


class MemoryOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pid: Annotated[int, msgspec.Meta(ge=1)]
    fd: Annotated[int, msgspec.Meta(ge=0)]
    name: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    nbytes: Annotated[int, msgspec.Meta(ge=1)]
    cell: Annotated[int, msgspec.Meta(ge=0, lt=CELLS)]
    nonce: LinkNumber


class LinkAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    worker: bytes
    link: LinkNumber
    offer: MemoryOffer | None = None


# ------------------------------------------------------------ transfer

INDEX_BITS = 24
TAG_BITS = LABEL_BITS - INDEX_BITS
TransferTag: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << TAG_BITS)]


class EngineSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    protocol: int
    fingerprint: str
    dtype: str
    block_size: int
    num_layers: int
    kv_heads: int
    head_dim: int
    tp_size: int


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="hello"):
    boot_id: BootId
    spec: EngineSpec
    rank_addresses: list[Annotated[bytes, msgspec.Meta(max_length=65536)]]


class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="welcome"):
    boot_id: BootId
    spec: EngineSpec
    rank_addresses: list[Annotated[bytes, msgspec.Meta(max_length=65536)]]


class Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="refused"):
    boot_id: BootId
    field: str
    ours: str
    theirs: str


class PrefillRequest(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="prefill", kw_only=True
):
    transfer_id: TransferId
    tag: TransferTag
    token_ids: list[int]
    first_block: Annotated[int, msgspec.Meta(ge=0)]
    sampling: SamplingParams
    deadline_s: Annotated[float, msgspec.Meta(gt=0)]
    sibling_seeds: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)], ...] = ()
    cache_salt: str = ""
    digests: bool = True


class Digests(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="digests"):
    transfer_id: TransferId
    source: Annotated[int, msgspec.Meta(ge=0)]
    target: Annotated[int, msgspec.Meta(ge=0)]
    first_block: Annotated[int, msgspec.Meta(ge=0)]
    digests: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=1)]


class PrefillLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    queued_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    tokens_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0


UNKNOWN_LOAD = PrefillLoad()


class FirstToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="first_token"):
    transfer_id: TransferId
    tokens: Annotated[tuple[SampledToken, ...], msgspec.Meta(min_length=1)]
    cached_tokens: int
    load: PrefillLoad = UNKNOWN_LOAD


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="done"):
    transfer_id: TransferId


class Cancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="cancel"):
    transfer_id: TransferId


class Failed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="failed"):
    transfer_id: TransferId
    reason: Annotated[str, msgspec.Meta(max_length=2000)]


class Ping(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="ping"):
    boot_id: BootId


class Pong(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="pong"):
    boot_id: BootId
    load: PrefillLoad = UNKNOWN_LOAD


MAX_PROBE_MESSAGE_BYTES = 16 * 2**20
MAX_PROBE_BYTES = 256 * 2**20


class Examine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="examine"):
    boot_id: BootId


class Examined(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="examined", kw_only=True):
    boot_id: BootId
    version: Annotated[str, msgspec.Meta(max_length=128)]
    spec: EngineSpec
    block_bytes: Annotated[int, msgspec.Meta(ge=1)]
    clock_ms: int
    machine: Annotated[str, msgspec.Meta(max_length=128)]
    ipc_namespace: Annotated[str, msgspec.Meta(max_length=128)]


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="probe", kw_only=True):
    boot_id: BootId
    address: Annotated[bytes, msgspec.Meta(max_length=65536)]
    message_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROBE_MESSAGE_BYTES)]
    messages: Annotated[int, msgspec.Meta(ge=1, le=65536)]


class ProbeOpened(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="probe_opened"):
    boot_id: BootId
    address: Annotated[bytes, msgspec.Meta(max_length=65536)]


class ProbeRefused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="probe_refused"):
    boot_id: BootId
    reason: Annotated[str, msgspec.Meta(max_length=2000)]


class ProbeEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="probe_end"):
    boot_id: BootId


ToPrefill: TypeAlias = Hello | PrefillRequest | Done | Cancel | Ping | Examine | Probe | ProbeEnd
ToDecode: TypeAlias = Welcome | Refused | Digests | FirstToken | Failed | Pong | Examined | ProbeOpened | ProbeRefused
