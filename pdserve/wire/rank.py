"""Rank 0 of an engine ↔ its other tensor-parallel ranks, over private ZMQ PAIR sockets (ipc).

    rank 0                                   rank 1, 2, …
            ◀───────────────────────────── Arrived    its libraries are loaded
      LoadModel ─────────────────────────▶            after both have met in their group
            ◀───────────────────────────── Loaded
      Capture ───────────────────────────▶            on GPUs, once
            ◀───────────────────────────── Captured
      Step, Draft, Clear, CopyBlocks,
      DownloadBlocks, UploadBlocks ──────────────────▶            in the order in which rank 0 does the same
            ◀───────────────────────────── Written    after each Clear and each CopyBlocks
            ◀───────────────────────────── RankFailed instead of any of its other messages; the process ends
      Stop ──────────────────────────────▶

Rank 0's messages are numbered from 1, over all kinds. A message that was lost or overtook another is an error.

The transfer threads of the ranks have a channel of their own (``RankTransferMessage``), in the same way. Rank 0 alone
talks to other nodes' control channels, and each rank moves its own part of the KV cache. A *link* is one rank's
connection to all ranks of one other engine. Rank 0 numbers the links. A block has the same number on all ranks.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, TypeAlias

import msgspec

from pdserve.wire.discovery import TransportKind
from pdserve.wire.transfer import TransferTag

# ---------------------------------------------------------------- rank 0 → rank


class LoadModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="load"):
    """Orders a rank to load its part of the model, with a KV cache of as many blocks as each other rank has."""

    num_blocks: int
    max_model_len: int
    bounded: tuple[int, ...] = ()
    """The blocks of each group of the cache that does not keep whole contexts."""
    drafts: bool = False
    """Whether ``Draft`` may follow."""


class Capture(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="capture"):
    """Orders a rank to record the decode steps of all batch sizes, together with the other ranks."""

    max_rows: int
    """The most tokens that a recorded step has."""
    linked: bool = False
    """Whether steps with drafts are recorded for models that keep states."""


class RankRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=0):
    """A ``StepRow`` of ``pdserve.models.runner``, as a whole."""

    token_ids: list[int]
    start: int
    block_table: list[int]
    wants_logits: bool
    scored_from: int = 0
    scored_to: int = 0
    """The logits after the tokens from ``scored_from`` to this one are wanted, too; 0 if none are."""
    others: list[list[int]] = []
    windows: dict[int, int] = {}
    """The places of windows' tables among ``others``, each with the number of first blocks that it has given back."""

    @property
    def scored(self) -> range:
        return range(self.scored_from, self.scored_to)


class NextRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=1):
    """A ``StepRow`` whose tables are those of a row before it, which are known. No token of it is scored."""

    row: int
    """The place of that row in the last step; or, if it is one of this step, -1 - its place here."""
    token_ids: list[int]
    blocks: list[int]
    """The ids that the table has got since."""
    wants_logits: bool
    back: int = 0
    """So many tokens before the end of that row this one starts."""
    others: list[list[int]] = []
    """A window's table has the number of first blocks that it has given back, and the ids that it has got since; or
    nothing, if it is as it was. A group of states has both states."""


class NextRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, tag=2):
    """Rows in turn, of which each is a ``NextRow`` of the next row in turn of the last step.

    Each begins where that one ends, and has one token, whose logits are wanted. Of states, it begins with that which
    that one writes.
    """

    row: int
    """The place of the row before the first of these in the last step."""
    token_ids: list[int]
    """The token of each row. The lists below name a row by its place here."""
    grown: list[int] = []
    """The rows of which every table has got one more block."""
    blocks: list[list[int]] = []
    """These blocks: of the first group, and of each window."""
    given_back: list[list[int]] = []
    """Each window has the rows whose tables have given one more of their first blocks back."""
    states: list[list[int]] = []
    """Each group of states has the state that each row writes."""


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="step"):
    """Orders a rank to compute one step together with the other ranks."""

    rows: list[RankRow | NextRow | NextRows]


class RankDraft(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A ``DraftRow`` of ``pdserve.models.runner``."""

    row: int
    next_tokens: list[int]
    wanted: bool
    blocks: list[int] = []
    """The ids that the row's table has got since the step, unless another row of the message has brought them."""
    whole: bool = False
    """Whether ``blocks`` is the whole table."""


class Draft(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="draft"):
    """Orders a rank to draft tokens behind the last step together with the other ranks."""

    rows: list[RankDraft]
    count: int


class Clear(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="clear"):
    """Orders a rank to zero these KV blocks."""

    blocks: list[int]


class CopyBlocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="copy"):
    """Orders a rank to copy whole KV blocks; all sources are read before any destination is written."""

    sources: list[int]
    destinations: list[int]


class DownloadBlocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="download"):
    """Orders a rank to copy KV blocks to staging blocks, from which they are sent; the board counts orders done."""

    blocks: list[int]
    staged: list[int] = msgspec.field(name="slots")


class UploadBlocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="upload"):
    """Orders a rank to copy staging blocks, which were received, to the cache; the board counts orders done."""

    staged: list[int] = msgspec.field(name="slots")
    blocks: list[int]


class Stop(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="stop"):
    """Orders a rank to exit with status 0."""


Order: TypeAlias = LoadModel | Capture | Step | Draft | Clear | CopyBlocks | DownloadBlocks | UploadBlocks | Stop


class Numbered(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An order with its number."""

    number: int
    order: Order


# ---------------------------------------------------------------- rank → rank 0


class Arrived(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="arrived"):
    """The rank is ready to meet the other ranks."""


class Loaded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="loaded"):
    """The rank has loaded its weights."""


class Captured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="captured"):
    """The rank has recorded all decode steps."""


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="written"):
    """A ``Clear`` or ``CopyBlocks`` has written its blocks. A KV transfer may write there from now on."""


class RankFailed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="failed"):
    """The rank's process is about to exit. ``message`` says why."""

    message: str


FromRank: TypeAlias = Arrived | Loaded | Captured | Written | RankFailed


BlockIds: TypeAlias = tuple[int, ...]
Address: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=65_536)]


class _RankMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    link: int


# ---------------------------------------------------------------- rank 0 → rank


class Direction(enum.Enum):
    """What a link is for. Two engines that fetch from each other have a link for each direction."""

    FETCH = "fetch"
    """This engine receives the other engine's blocks over it."""
    PUSH = "push"
    """This engine sends its own blocks over it."""


class OpenLink(_RankMessage, frozen=True, tag="open"):
    """Orders a rank to open a link. The answer is ``LinkOpened``."""

    direction: Direction


class ConnectLink(_RankMessage, frozen=True, tag="connect"):
    addresses: tuple[Address, ...]
    """The addresses of the other engine's ranks, in rank order."""


class CloseLink(_RankMessage, frozen=True, tag="close"):
    """Orders a rank to close a link. The answer is ``LinkClosed``. From then on the link touches no memory."""


class Expect(_RankMessage, frozen=True, tag="expect"):
    """Orders a rank of a fetching engine to let these blocks land. The answer is ``Expecting``."""

    tag: TransferTag
    first_block: int
    block_ids: BlockIds
    digests: bool
    paced: bool = False
    """Whether ``ExpectMore`` may follow until ``Forget``."""


class ExpectMore(_RankMessage, frozen=True, tag="expect_more"):
    """Orders a rank to let the next blocks of a paced transfer land, too. The answer is ``Expecting``."""

    tag: TransferTag
    block_ids: BlockIds


class Forget(_RankMessage, frozen=True, tag="forget"):
    """Orders a rank to accept no more pieces of a transfer. The answer is ``Forgotten``."""

    tag: TransferTag


class SendBlocks(_RankMessage, frozen=True, tag="send"):
    """Orders a rank of a pushing engine to send these final blocks, which are the prompt's from ``first_block`` on."""

    tag: TransferTag
    first_block: int
    block_ids: BlockIds
    digests: bool


class LeaveRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="leave"):
    """Orders a rank to close everything and end the thread."""


LinkCommand: TypeAlias = ConnectLink | CloseLink | Expect | ExpectMore | Forget | SendBlocks
RankCommand: TypeAlias = OpenLink | LinkCommand | LeaveRank

# ---------------------------------------------------------------- rank → rank 0


class LinkOpened(_RankMessage, frozen=True, tag="opened"):
    address: Address


class LinkInUse(_RankMessage, frozen=True, tag="in_use"):
    """The link has moved its first pieces, by this transport."""

    transport: TransportKind
    lanes: str
    no_rdma: str
    """Why they did not go by RDMA, if that is to be known (see ``LinkPath``)."""


class LinkBroken(_RankMessage, frozen=True, tag="broken"):
    """The link moves nothing any more, and rank 0 must close it."""

    reason: str


class LinkClosed(_RankMessage, frozen=True, tag="closed"):
    pass


class Expecting(_RankMessage, frozen=True, tag="expecting"):
    tag: TransferTag


class PiecesLanded(_RankMessage, frozen=True, tag="landed"):
    tag: TransferTag
    indexes: tuple[int, ...]
    """The indexes of the pieces (see ``pdserve_kvtransfer.pieces``)."""
    digests: tuple[int, ...]
    """The digest of each piece; empty if digests are not wanted."""
    size: int
    """The bytes of all these pieces."""


class Forgotten(_RankMessage, frozen=True, tag="forgotten"):
    tag: TransferTag
    in_flight: BlockIds
    """Blocks that may still be written to, until ``Released`` names them."""


class Released(_RankMessage, frozen=True, tag="released"):
    tag: TransferTag
    block_ids: BlockIds


class Dropped(_RankMessage, frozen=True, tag="dropped"):
    """Pieces that belong to no transfer were received into scratch memory."""

    count: int


class PiecesSent(_RankMessage, frozen=True, tag="sent"):
    tag: TransferTag
    count: int
    size: int
    """The bytes of all these pieces."""


class PiecesAnnounced(_RankMessage, frozen=True, tag="announced"):
    """The digests of the pieces that this rank sends to ``target``, one for each block; 0 for a block without one."""

    tag: TransferTag
    target: int
    first_block: int
    digests: tuple[int, ...]


RankReport: TypeAlias = (
    LinkOpened
    | LinkInUse
    | LinkBroken
    | LinkClosed
    | Expecting
    | PiecesLanded
    | Forgotten
    | Released
    | Dropped
    | PiecesSent
    | PiecesAnnounced
)

_prepared: list[msgspec.msgpack.Decoder[Any]] = [msgspec.msgpack.Decoder(kind) for kind in (RankCommand, RankReport)]
"""The first decoder of a struct prepares it, and msgspec 0.22 crashes if two threads do that at once."""
