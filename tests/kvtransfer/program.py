"""An engine in a process of its own, each of whose answers is one line: ``python -m tests.kvtransfer.program WAY ROLE
…``.

The way is ``mapped`` or ``copied``, which is how blocks move that could be mapped.

``prefill MANNER`` prints ``CONTROL BOOT`` and pushes the blocks that it is asked for: block i is filled with
``pattern(i)``. The manner ``all`` pushes all blocks at once, and ``drip`` one at a time. ``stall`` pushes only the
first half, and no first token. ``state`` is a model with ``STATE_GROUPS``, and pushes all blocks and then the state,
and no first token. ``decode CONTROL BOOT`` fetches a prompt that has all blocks, and prints ``receiving`` when some
have landed.
"""

from __future__ import annotations

import sys
import time

import msgspec

from pdserve.config import TransferConfig
from pdserve.wire.cache_groups import GroupSpec, Keep, laid_out
from pdserve.wire.sampling_params import SampledToken
from pdserve.wire.terms import PrefillTarget
from pdserve_kvtransfer.events import PushWanted
from tests.eventually import eventually
from tests.kvtransfer.rig import CONFIG, SPEC, Engine, Pair

NUM_BLOCKS = 24
BLOCK_BYTES = 3 * 2**19
ENDLESS_S = 3600.0
STATE_SPECS = (
    GroupSpec("all", Keep.ALL, 1, 3, 1024, "bf16"),
    GroupSpec("state", Keep.LATEST, 1, 3, 16 * 2**20, "fp32"),
)
"""The groups of a model whose state takes far longer to move than its blocks."""
STATE_GROUPS, _ = laid_out(STATE_SPECS, (NUM_BLOCKS, 1), (3 * 1024, 48 * 2**20))
DRIP_S = 0.05


def pattern(index: int) -> int:
    return 1 + index % 255


def state_engine(config: TransferConfig = CONFIG) -> Engine:
    """Returns an engine of ``STATE_GROUPS``."""
    return Engine(spec=msgspec.structs.replace(SPEC, groups=STATE_SPECS), config=config, groups=STATE_GROUPS)


def _prefill(manner: str) -> None:
    engine = state_engine() if manner == "state" else Engine(num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES)
    for index in range(engine.region.num_blocks):
        block = engine.region.block(index)
        block[:] = bytes([pattern(index)]) * len(block)
    print(engine.address, engine.boot_id.hex(), flush=True)
    while True:
        event = engine.take(ENDLESS_S)
        if isinstance(event, PushWanted):
            _push(engine, event, manner)


def _push(engine: Engine, wanted: PushWanted, manner: str) -> None:
    blocks = tuple(range(-(-len(wanted.token_ids) // SPEC.block_size)))
    if manner == "state":
        engine.thread.push(wanted.transfer_id, 0, (*blocks, NUM_BLOCKS))
        return
    if manner == "stall":
        engine.thread.push(wanted.transfer_id, 0, blocks[: len(blocks) // 2])
        return
    if manner == "drip":
        for block in blocks:
            engine.thread.push(wanted.transfer_id, block, (block,))
            time.sleep(DRIP_S)
    else:
        engine.thread.push(wanted.transfer_id, 0, blocks)
    engine.thread.first_token(wanted.transfer_id, (SampledToken(5),), 0)


def _decode(control: str, boot: str) -> None:
    engine = Engine(num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES)
    target = PrefillTarget("p", control, bytes.fromhex(boot))
    engine.thread.fetch(Pair(engine, engine).order(tuple(range(NUM_BLOCKS)), target=target))
    eventually(lambda: engine.thread.stats().bytes_received > 0)
    print("receiving", flush=True)
    engine.take(ENDLESS_S)


if __name__ == "__main__":
    Engine.shares = sys.argv[1] == "mapped"
    if sys.argv[2] == "prefill":
        _prefill(sys.argv[3])
    else:
        _decode(*sys.argv[3:5])
