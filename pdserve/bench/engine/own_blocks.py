"""Gives each request of a timed step blocks of its own in every group of the cache, without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.models.checkpoint.decoder_config import DecoderConfig
from pdserve.models.layer_groups import layer_groups
from pdserve.wire.cache_groups import GroupBlocks, Keep


def bounded_counts(config: DecoderConfig, num_blocks: int, requests: int) -> list[int]:
    """Returns the blocks of each group behind the first one, which has ``num_blocks``."""
    groups = layer_groups(config).groups[1:]
    return [2 * requests if group.keep is Keep.LATEST else num_blocks for group in groups]


def other_tables(bounded: Sequence[GroupBlocks], blocks: range, request: int) -> list[Sequence[int]]:
    """Returns ``StepRow.others`` of a request which has these blocks of the first group."""
    tables: list[Sequence[int]] = []
    for group in bounded:
        if group.spec.keep is Keep.LATEST:
            present = group.first + 2 * request
            tables.append((present, present + 1))
        else:
            tables.append(range(group.first + blocks.start, group.first + blocks.stop))
    return tables
