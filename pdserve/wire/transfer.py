"""Decode engine ↔ prefill engine: control messages in sealed frames, between a decode DEALER and a prefill ROUTER.

A handshake carries the addresses of the ranks' links as bytes. Links alone decode them, as ``LinkAddress``.

``PrefillRequest``, ``CachedRequest`` and ``Probe`` say what to do, so a receiver refuses fields that it does not know.
All others report facts, and a receiver ignores fields of them that it does not know.

    decode                                   prefill
      Hello ─────────────────────────────▶            before anything else between two boots
            ◀───────────────────────────── Welcome    or Refused
      PrefillRequest ────────────────────▶
            ◀───────────────────────────── BlocksReady    if the request is paced
      Accept ────────────────────────────▶            so many of them have destinations
            ◀═════════ KV blocks (UCX) ═══            as chunks finish, each with its label
            ◀───────────────────────────── Digests    what those blocks must be
            ◀───────────────────────────── FirstToken    with the prefill engine's load
      Done ──────────────────────────────▶            all blocks landed: the prefill node may free
      Ping ──────────────────────────────▶            while any transfer is alive; renews the leases of both sides
            ◀───────────────────────────── Pong    with the prefill engine's load
      Cancel ────────────────────────────▶            the request is over for other reasons
            ◀───────────────────────────── Failed     the transfer is over, and why

Every transfer ends with exactly one of ``Done``, ``Failed`` or ``Cancel``.

Blocks that an engine has computed already are asked for by their hashes. Everything else is as above:

      CachedRequest ─────────────────────▶            in place of PrefillRequest
            ◀───────────────────────────── Held    in place of FirstToken: so many of them are sent
      Offer ─────────────────────────────▶            the sender has these blocks now, and can be asked for them

``pdserve doctor`` asks, with the sockets of a decode engine:

      Examine ───────────────────────────▶            who is there
            ◀───────────────────────────── Examined
      Probe ─────────────────────────────▶            a link of its own, which knows no KV memory
            ◀───────────────────────────── ProbeOpened    or ProbeRefused, also later
            ◀══ pings and scratch bytes (UCX) ══▶
      ProbeEnd ──────────────────────────▶
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, TypeAlias

import msgspec

from pdserve.control.frame import Reason
from pdserve.wire.cache_groups import GroupSpec, split_heads
from pdserve.wire.ids import BootId, RequestId, TransferId
from pdserve.wire.sampling_params import PromptLogprobs, SampledToken, SamplingParams
from pdserve.wire.terms import NO_PROMPT_TERMS, PrefillTarget, PromptTerms
from pdserve.wire.version import Spoken

LABEL_BITS = 63
"""The bits of a message's label (see ``pdserve_kvtransfer.pieces``)."""

CELLS = 512
"""How many links can offer one memory at once."""

LinkNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << 62)]


class MemoryOffer(msgspec.Struct, frozen=True):
    """Tells processes of the same user on the same host where to find a link's memory, to read it."""

    pid: Annotated[int, msgspec.Meta(ge=1)]
    fd: Annotated[int, msgspec.Meta(ge=0)]
    name: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    """A random name: a file of this name is the memory that is meant, on whichever host this is read."""
    nbytes: Annotated[int, msgspec.Meta(ge=1)]
    cell: Annotated[int, msgspec.Meta(ge=0, lt=CELLS)]
    """The number of the 64-bit cell before the memory that holds ``nonce`` while reads of the memory count."""
    nonce: LinkNumber


class LinkAddress(msgspec.Struct, frozen=True):
    worker: bytes
    """The address of the link's UCX worker."""
    link: LinkNumber
    """A random number by which the other side tells which link has attached."""
    offer: MemoryOffer | None = None


INDEX_BITS = 24
TAG_BITS = LABEL_BITS - INDEX_BITS
"""A label is ``tag << INDEX_BITS | index``."""

TransferTag: TypeAlias = Annotated[int, msgspec.Meta(ge=1, lt=1 << TAG_BITS)]


BLOCK_HASH_BYTES = 32

BlockHash: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=BLOCK_HASH_BYTES, max_length=BLOCK_HASH_BYTES)]
"""The hash of a full block. It covers the cache salt and all tokens up to the block's end."""

MAX_HASHES = 65_536
"""How many blocks one message can name. They fit into a frame, and their pieces into ``INDEX_BITS``."""

BlockHashes: TypeAlias = Annotated[tuple[BlockHash, ...], msgspec.Meta(min_length=1, max_length=MAX_HASHES)]
"""The hashes of blocks that follow each other in one text."""


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The properties in which two engines must agree, in the order in which a misfit is reported."""

    protocol: int
    """The newest version of the protocol that the engine supports."""
    fingerprint: str
    """The model's fingerprint: a digest of all that its answers depend on."""
    dtype: str
    block_size: int
    num_layers: int
    kv_heads: int
    head_dim: int
    tp_size: int
    oldest_protocol: int
    """The oldest version that the engine supports."""
    groups: tuple[GroupSpec, ...] = ()
    """The model's cache groups; empty if it has one, which the other fields describe."""

    @property
    def spoken(self) -> Spoken:
        return Spoken(self.protocol, self.oldest_protocol)

    @property
    def group_heads(self) -> tuple[int, ...]:
        """The heads of each group by which ranks split its blocks; 0 if they do not, or if its blocks have no bytes."""
        return split_heads(self.groups) or (self.kv_heads,)


class Hello(msgspec.Struct, frozen=True, tag_field="kind", tag="hello"):
    boot_id: BootId
    spec: EngineSpec
    rank_addresses: list[Annotated[bytes, msgspec.Meta(max_length=65_536)]]
    """The encoded ``LinkAddress`` of each TP rank, in rank order."""


class Welcome(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="welcome"):
    boot_id: BootId
    spec: EngineSpec
    rank_addresses: list[Annotated[bytes, msgspec.Meta(max_length=65_536)]]
    """The addresses, as in ``Hello``. With an endpoint, a receiver can end receives whose sender is gone."""
    max_prompt_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Longer prompts are refused; 0 if the sender does not say."""
    lease_ms: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The time for which a decode engine may be silent while a transfer is alive; 0 if the sender does not say."""


class Refused(msgspec.Struct, frozen=True, tag_field="kind", tag="refused"):
    """The handshake failed because ``field`` differs. ``ours`` is the sender's value.

    The ``field`` is ``handshake`` in the answer to a boot that the prefill engine has no handshake with (any more), and
    ``boot_id`` in the answer to a frame for another start of the prefill engine.
    """

    boot_id: BootId
    field: str
    ours: str
    theirs: str


class _BlocksRequest(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="kind", kw_only=True
):
    """What every request for blocks says."""

    transfer_id: TransferId
    tag: TransferTag
    deadline_s: Annotated[float, msgspec.Meta(gt=0)]
    digests: bool = True
    """Whether the asker checks blocks, and so needs ``Digests``."""
    paced: bool = False
    """Whether each block needs an ``Accept`` before it is sent: the asker has few free staging blocks."""


class PrefillRequest(_BlocksRequest, frozen=True, tag="prefill", kw_only=True):
    """Asks to compute a prompt's KV cache and push its blocks from ``first_block`` on.

    The prompt has ``ceil(len(token_ids) / block_size)`` blocks in all. For a model with cache groups the wanted blocks
    are ``moved_blocks``, the first of which has the number ``first_block``.

    The prefill node never learns the decode node's block ids: a piece of a block travels under its index, and the
    receiver alone decides where an index lands.
    """

    token_ids: list[int]
    first_block: Annotated[int, msgspec.Meta(ge=0)]
    sampling: SamplingParams
    child_seeds: tuple[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)], ...] = msgspec.field(
        default=(), name="sibling_seeds"
    )
    """Seeds of further answers to this prompt: a first token is sampled for each."""
    terms: PromptTerms = NO_PROMPT_TERMS

    @property
    def request_id(self) -> str:
        return self.terms.request_id


class CachedRequest(_BlocksRequest, frozen=True, tag="cached", kw_only=True):
    """Asks for the blocks with these hashes, as far as the receiver's prefix cache has them from the first one on.

    Nothing is computed. The block of ``hashes[i]`` has the number i among the blocks of the transfer. For a model with
    cache groups those are the ``moved_blocks`` of a context of ``len(hashes)`` blocks.
    """

    hashes: BlockHashes
    request_id: RequestId = ""
    """The request's ``x-request-id``, for the receiver's log; empty if it is not known."""


class BlocksReady(msgspec.Struct, frozen=True, tag_field="kind", tag="blocks_ready"):
    """All wanted blocks of a paced transfer before ``end_block`` can be sent."""

    transfer_id: TransferId
    end_block: Annotated[int, msgspec.Meta(ge=0)]


class Accept(msgspec.Struct, frozen=True, tag_field="kind", tag="accept"):
    """All wanted blocks of a paced transfer before ``end_block`` may be sent, because they have destinations."""

    transfer_id: TransferId
    end_block: Annotated[int, msgspec.Meta(ge=0)]


class Digests(msgspec.Struct, frozen=True, tag_field="kind", tag="digests"):
    """The digests of the pieces that prefill rank ``source`` sent to decode rank ``target``, from ``first_block`` on.

    Each block has one of these pieces (see ``pdserve_kvtransfer.pieces``), or none if ``target`` gets the blocks of its
    cache group from other ranks: 0 stands in its place.
    """

    transfer_id: TransferId
    source: Annotated[int, msgspec.Meta(ge=0)]
    target: Annotated[int, msgspec.Meta(ge=0)]
    first_block: Annotated[int, msgspec.Meta(ge=0)]
    digests: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=1)]


class PrefillLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """The load of a prefill engine, as it measures it."""

    queued_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The tokens of prompts that it has accepted and not computed."""
    tokens_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """The prompt tokens that it computes a second; 0 before that was measured."""
    streams: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The requests of its own clients that have a place in its batch: they stall while it computes a prompt."""


UNKNOWN_LOAD = PrefillLoad()


class FirstToken(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="first_token"):
    transfer_id: TransferId
    tokens: Annotated[tuple[SampledToken, ...], msgspec.Meta(min_length=1)]
    """The request's first token, then those of its children in order."""
    cached_tokens: Annotated[int, msgspec.Meta(ge=0)]
    load: PrefillLoad = UNKNOWN_LOAD
    """The prefill engine's load after this prompt."""
    prompt_logprobs: PromptLogprobs | None = None
    """The log probabilities of the prompt's tokens after its first one, if ``sampling`` asks for them."""


class Held(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="held"):
    """The receiver of a ``CachedRequest`` has the first ``count`` of the wanted blocks, and sends no others.

    A model with cache groups needs more than blocks that follow each other to go on from: what its other groups keep at
    the end of them. So the ``count`` is then that of all wanted blocks, or 0.
    """

    transfer_id: TransferId
    count: Annotated[int, msgspec.Meta(ge=0, le=MAX_HASHES)]
    usable: Annotated[int, msgspec.Meta(ge=0, le=MAX_HASHES)] = 0
    """How many blocks could be had if just these were asked for, in an answer of 0 for a model with cache groups."""


class Offer(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="offer"):
    """The sender holds the blocks with these hashes. Nobody has to ask for them, and it may evict them at any time."""

    holder: PrefillTarget
    """The sender, as a ``CachedRequest`` reaches it."""
    hashes: BlockHashes
    """The hashes of a text's blocks, from its first block on."""
    request_id: RequestId = ""
    """The ``x-request-id`` of the request whose text this is, for logs; empty if it is not known."""


class Done(msgspec.Struct, frozen=True, tag_field="kind", tag="done"):
    transfer_id: TransferId


class Cancel(msgspec.Struct, frozen=True, tag_field="kind", tag="cancel"):
    transfer_id: TransferId


class FailureCause(enum.Enum):
    """What the failure of a transfer says about the prefill engine."""

    NODE = "node"
    """The failure is the prefill engine's, which could not go on."""
    PROMPT = "prompt"
    """The failure is this prompt's, which the prefill engine cannot compute. It can compute others."""
    LOAD = "load"
    """The prefill engine has too much to do."""
    DEADLINE = "deadline"
    """The prompt was not computed in its time."""


class Failed(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="failed"):
    transfer_id: TransferId
    reason: Reason
    cause: FailureCause = FailureCause.NODE
    load: PrefillLoad = UNKNOWN_LOAD
    """The prefill engine's load, if the cause is ``LOAD``."""


class Ping(msgspec.Struct, frozen=True, tag_field="kind", tag="ping"):
    boot_id: BootId


class Pong(msgspec.Struct, frozen=True, tag_field="kind", tag="pong"):
    boot_id: BootId
    load: PrefillLoad = UNKNOWN_LOAD
    """The prefill engine's present load."""


MAX_PROBE_MESSAGE_BYTES = 16 * 2**20
MAX_PROBE_BYTES = 256 * 2**20
"""The most bytes of all messages of one probe together."""


class Examine(msgspec.Struct, frozen=True, tag_field="kind", tag="examine"):
    boot_id: BootId
    protocol: int
    oldest_protocol: int


class Examined(msgspec.Struct, frozen=True, tag_field="kind", tag="examined", kw_only=True):
    """The properties of a prefill engine, told without a handshake."""

    boot_id: BootId
    version: Annotated[str, msgspec.Meta(max_length=128)]
    """The engine's version of pdserve."""
    spec: EngineSpec
    block_bytes: Annotated[int, msgspec.Meta(ge=1)]
    """The bytes of one KV block on rank 0."""
    clock_ms: int
    """The engine's wall clock, in milliseconds since 1970."""
    machine: Annotated[str, msgspec.Meta(max_length=128)]
    """An id that is the same for all processes of one running kernel."""
    ipc_namespace: Annotated[str, msgspec.Meta(max_length=128)]
    """The IPC namespace. Processes of one machine that differ in it share no memory."""


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="probe", kw_only=True):
    """Asks for a link for measuring, which uses scratch memory alone and is bounded in bytes and time."""

    boot_id: BootId
    address: Annotated[bytes, msgspec.Meta(max_length=65_536)]
    """The asker's encoded ``LinkAddress``."""
    message_bytes: Annotated[int, msgspec.Meta(ge=1, le=MAX_PROBE_MESSAGE_BYTES)]
    messages: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    """The number of messages that the engine sends once the asker asks for them over UCX."""


class ProbeOpened(msgspec.Struct, frozen=True, tag_field="kind", tag="probe_opened"):
    boot_id: BootId
    address: Annotated[bytes, msgspec.Meta(max_length=65_536)]


class ProbeRefused(msgspec.Struct, frozen=True, tag_field="kind", tag="probe_refused"):
    """The prefill engine does not open the link of a probe, or has closed it."""

    boot_id: BootId
    reason: Reason


class ProbeEnd(msgspec.Struct, frozen=True, tag_field="kind", tag="probe_end"):
    boot_id: BootId


ToPrefill: TypeAlias = (
    Hello | PrefillRequest | CachedRequest | Accept | Done | Cancel | Ping | Offer | Examine | Probe | ProbeEnd
)
ToDecode: TypeAlias = (
    Welcome
    | Refused
    | BlocksReady
    | Digests
    | FirstToken
    | Held
    | Failed
    | Pong
    | Examined
    | ProbeOpened
    | ProbeRefused
)


_prepared: list[msgspec.msgpack.Decoder[Any]] = [
    msgspec.msgpack.Decoder(kind) for kind in (ToPrefill, ToDecode, LinkAddress)
]
"""The first decoder of a struct prepares it, and msgspec 0.22 crashes if two threads do that at once."""


def sender_of(message: ToPrefill) -> BootId:
    """Returns the boot that the message says it is from. It is authentic only if the frame's sender is the same."""
    match message:
        case PrefillRequest() | CachedRequest() | Accept() | Done() | Cancel():
            return message.transfer_id.decode_boot
        case Offer():
            return message.holder.boot_id
        case _:
            return message.boot_id
