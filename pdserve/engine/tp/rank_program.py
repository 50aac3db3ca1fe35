"""``python -m pdserve.engine.tp.rank_program``: a tensor-parallel rank other than 0, from launch message to exit code.

It owns its part of the weights and of the KV cache, and does what rank 0 orders. Idle, it waits in a blocking receive.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from pdserve.config import RankLaunch
from pdserve.engine.tp.rank_channel import OrderChannel
from pdserve.errors import EngineError, PdserveError
from pdserve.liveness import LifeBoard, step_loop
from pdserve.machine.memory import give_freed_memory_back
from pdserve.models.lean_torch import import_torch
from pdserve.models.tp.rank_board import RankBoard
from pdserve.process import collect_rarely, loading_libraries, pin_to_cores, read_launch, set_up_logging
from pdserve.wire.rank import (
    Arrived,
    Capture,
    Captured,
    Clear,
    CopyBlocks,
    DownloadBlocks,
    Draft,
    Loaded,
    LoadModel,
    Order,
    RankFailed,
    Step,
    Stop,
    UploadBlocks,
    Written,
)

if TYPE_CHECKING:
    import torch

    from pdserve.engine.kv_connector.opening import NoCopies, OrderedCopies
    from pdserve.engine.tp.rank_rows import ReceivedRows
    from pdserve.models.backend import Backend
    from pdserve.models.runner import ModelRunner

log = logging.getLogger("pdserve.engine.tp.rank_program")

LINGER_S = 1.0


def main() -> int:
    """Runs the rank. Returns 0 after Stop.

    After a failure, which rank 0 is told, the process ends at once with 1: a GPU may be waiting for another rank, and
    would keep libraries from being unloaded.
    """
    # Rank 0 decides when its ranks end; a signal to a whole process group must not end them under a running step.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    launch = read_launch(RankLaunch)
    rank = f"rank {launch.rank}"
    set_up_logging(launch.config.log, rank, node=launch.config.node, prefix=f"{rank}: ")
    with zmq.Context() as context:
        life = LifeBoard(launch.life)
        sign = life.sign(step_loop(launch.rank))
        channel = OrderChannel(context, launch.address, give_freed_memory_back, sign)
        failed: RankFailed | None = None
        try:
            run_rank(launch, channel, life)
        except PdserveError as exc:
            log.error("%s", exc)
            failed = RankFailed(str(exc))
        except Exception as exc:
            log.exception("the rank failed")
            failed = RankFailed(f"{type(exc).__name__}: {exc}")
        if failed is not None:
            channel.send(failed)
        channel.close(LINGER_S)
    if failed is not None:
        os._exit(1)
    return 0


def run_rank(launch: RankLaunch, channel: OrderChannel, life: LifeBoard) -> None:
    """Loads this rank's part of the model, and computes and shows ``life`` until rank 0 says stop.

    Raises PdserveError if it cannot be loaded, or another rank is lost.
    """
    pin_to_cores(launch.cores)
    with loading_libraries():
        import_torch()
        import torch

        from pdserve.engine.kv_connector.opening import rank_transfer
        from pdserve.engine.kv_connector.transfer_memory import shared_memory
        from pdserve.engine.runner_loading import kept_block_kernels, load_runner, rank_backend, rank_device
        from pdserve.engine.tp.rank_rows import ReceivedRows
        from pdserve.models.checkpoint.config_reading import read_decoder_config
        from pdserve.models.checkpoint.gguf.file import forget_gguf
        from pdserve.models.rank_cache import cache_place
        from pdserve.models.tp.tp_groups import open_group

    torch.set_num_threads(launch.threads)
    config = launch.config
    device = rank_device(config, launch.rank)
    channel.send(Arrived())
    with ExitStack() as stack:
        board = stack.enter_context(closing(RankBoard(launch.board)))
        group = open_group(config.parallel, launch.rank, board, Path(launch.rendezvous), device)
        load = channel.receive()
        if not isinstance(load, LoadModel):
            raise EngineError(f"rank 0 sent {type(load).__name__} before LoadModel")
        decoder = read_decoder_config(Path(config.model_dir))
        backend = rank_backend(config, device)
        counts = (load.num_blocks, *load.bounded)
        cached = config.cache
        _, kv_bytes = cache_place(decoder, config.model.dtype, cached.block_size, counts, group, cached.kv_cache_dtype)
        shared = None
        if config.has_peers:
            shared = shared_memory(config.transfer, kv_bytes * group.size // 2**20, device, kv_bytes)
        kv_memory = None if shared is None else shared.bytes
        blocks = kept_block_kernels(config, backend)
        runner = load_runner(
            config, decoder, counts, load.max_model_len, group, backend, kv_memory, blocks, drafts=load.drafts
        )
        forget_gguf()
        sign = life.sign(step_loop(launch.rank))
        groups = runner.cache.groups if len(counts) > 1 else ()
        kv_cache = runner.cache.memory if groups else runner.kv_cache
        copies = stack.enter_context(rank_transfer(launch, decoder.kv_heads, kv_cache, board, shared, life, groups))
        stack.enter_context(sign.shown_by_this_thread(computes=device.type == "cpu"))
        received = ReceivedRows()
        collect_rarely()
        channel.send(Loaded())
        while not isinstance(order := channel.receive(), Stop):
            # Rank 0 notices a rank that takes longer, and says which one it was.
            sign.show(config.parallel.timeout_ms / 1000)
            if isinstance(order, Capture):
                capture(runner, backend, order)
                channel.send(Captured())
            else:
                carry_out(order, runner, copies, received)
                if isinstance(order, Clear | CopyBlocks):
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    channel.send(Written())
        group.close()


def capture(runner: ModelRunner, backend: Backend, order: Capture) -> None:
    """Records decode steps. Raises EngineError if this rank has no kernels for that."""
    from pdserve.models.runner import CudaGraphs

    if backend.graph_kernels is None:
        raise EngineError("rank 0 sent Capture to a rank whose steps cannot be recorded")
    runner.capture_decode(backend.graph_kernels, order.max_rows, CudaGraphs(), linked=order.linked)


def carry_out(order: Order, runner: ModelRunner, copies: OrderedCopies | NoCopies, received: ReceivedRows) -> None:
    """Carries out one order. Raises EngineError if it comes at the wrong time, MalformedFrame if it makes no sense."""
    match order:
        case Step():
            rows = received.rows(order)
            copies.decodes(any(len(row.token_ids) == 1 for row in rows))
            runner.run(rows, score=_computed if any(row.scored for row in rows) else None)
            copies.decodes(False)
        case Draft():
            runner.draft(received.drafts(order), order.count)
        case Clear(blocks):
            runner.clear(blocks)
        case CopyBlocks(sources, destinations):
            runner.copy_blocks(sources, destinations)
        case DownloadBlocks() | UploadBlocks():
            copies.order(order)
        case LoadModel() | Capture() | Stop():
            raise EngineError(f"rank 0 sent {type(order).__name__} at the wrong time")


def _computed(_: torch.Tensor) -> None:
    """Takes this rank's part of scored tokens' logits, which rank 0 has gathered."""


if __name__ == "__main__":
    sys.exit(main())
