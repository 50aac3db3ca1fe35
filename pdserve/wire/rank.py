"""Rank 0 of an engine ↔ its other tensor-parallel ranks, over private ZMQ PAIR sockets (ipc).

    rank 0                                   rank 1, 2, …
            ◀───────────────────────────── Arrived    its libraries are loaded
      LoadModel ─────────────────────────▶            after both have met in their group
            ◀───────────────────────────── Loaded
      Capture ───────────────────────────▶            on GPUs, once
            ◀───────────────────────────── Captured
      Step, Clear, CopyBlocks,
      DownloadBlocks, UploadBlocks ──────────────────▶            in the order in which rank 0 does the same
            ◀───────────────────────────── Written    after each Clear and each CopyBlocks
            ◀───────────────────────────── RankFailed instead of any of its other messages; the process ends
      Stop ──────────────────────────────▶

Rank 0's messages are numbered from 1, over all kinds. A message that was lost or overtook another is an error.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

# ---------------------------------------------------------------- rank 0 → rank


class LoadModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="load"):
    """Orders a rank to load its part of the model, with a KV cache of as many blocks as each other rank has."""

    num_blocks: int
    max_model_len: int


class Capture(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="capture"):
    """Orders a rank to record the decode steps of all batch sizes, together with the other ranks."""

    max_rows: int
    """The most tokens that a recorded step has."""


class RankRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A ``StepRow`` of ``pdserve.models.runner``."""

    token_ids: list[int]
    start: int
    block_table: list[int]
    wants_logits: bool
    scored_from: int = 0
    scored_to: int = 0
    """The logits after the tokens from ``scored_from`` to this one are wanted, too; 0 if none are."""

    @property
    def scored(self) -> range:
        return range(self.scored_from, self.scored_to)


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="step"):
    """Orders a rank to compute one step together with the other ranks."""

    rows: list[RankRow]


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


Order: TypeAlias = LoadModel | Capture | Step | Clear | CopyBlocks | DownloadBlocks | UploadBlocks | Stop


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
