"""Runs the engine process from its launch message to its exit code."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
import zmq

from pdserve.config import Device, EngineConfig, EngineLaunch, Switch
from pdserve.engine.api_channel import ApiChannel, WakeUp
from pdserve.engine.tp.tp_ranks import Ranks, running_ranks
from pdserve.errors import EngineError, PdserveError
from pdserve.liveness import LifeBoard, step_loop
from pdserve.machine.core_share import (
    NVIDIA_DRIVER,
    CoreShare,
    core_words,
    cores_left,
    cpu_quota,
    machine_id,
    other_engines,
    quota_note,
    share_cores,
    sharing_note,
)
from pdserve.models.lean_torch import import_torch
from pdserve.process import collect_rarely, loading_libraries, pin_to_cores, read_launch, set_up_logging
from pdserve.signals import ignore_hangup
from pdserve.wire.discovery import ComputeCores
from pdserve.wire.engine import EngineFailed, Starting

if TYPE_CHECKING:
    from pdserve.engine.launched_step import StepRunner

log = logging.getLogger("pdserve.engine")

LINGER_S = 1.0
"""The last messages to the API process have this long to leave."""


def main(around: Callable[[StepRunner], StepRunner] | None = None) -> int:
    """Reads the launch message from standard input and serves. Returns 0 after Shutdown or SIGTERM.

    ``around`` puts a runner of its own around the model's; only benchmarks do.

    After a failure, which the API process is told, this process ends at once with status 1: a GPU may be waiting for a
    rank that is gone, and would keep libraries from being unloaded. Peers see that the node is lost. A farewell would
    hide that from them, and they would send the request on that the engine may have died of.
    """
    ignore_hangup()
    launch = read_launch(EngineLaunch)
    set_up_logging(launch.config.log, "engine", node=launch.config.node)
    with zmq.Context() as context:
        batched = launch.config.stream.batched_dispatch is Switch.ON
        channel = ApiChannel(context, launch.address, batched=batched)
        try:
            channel.send(Starting("loading libraries"))
            serve(launch, channel, around)
        except Exception as exc:
            _report_failure(channel, exc.failure if isinstance(exc, _ServingFailed) else exc)
            channel.close(LINGER_S)
            context.term()
            os._exit(1)
        channel.close(LINGER_S)
    return 0


class _ServingFailed(Exception):
    """The engine failed after it had begun to serve."""

    def __init__(self, failure: Exception, left_open: ExitStack) -> None:
        """``left_open`` is to stay open until the process ends."""
        super().__init__(str(failure))
        self.failure = failure
        self.left_open = left_open


def _report_failure(channel: ApiChannel, failure: Exception) -> None:
    """Writes why the engine failed, and tells the API process."""
    if isinstance(failure, PdserveError):
        log.error("%s", failure)
        message = str(failure)
    else:
        log.error("the engine failed", exc_info=failure)
        message = f"{type(failure).__name__}: {failure}"
    # An API process that has stopped reading notices the end of this process.
    with suppress(EngineError):
        channel.send(EngineFailed(message))


def serve(launch: EngineLaunch, channel: ApiChannel, around: Callable[[StepRunner], StepRunner] | None = None) -> None:
    """Loads the model and runs the step loop until it is stopped.

    Raises an error if the engine cannot start, and _ServingFailed if it cannot go on.
    """
    config = launch.config
    with ExitStack() as stack:
        wake_up, life = WakeUp(), LifeBoard(launch.life)
        stack.callback(wake_up.close)
        ranks: Ranks | None = None
        allowed, quota = sorted(os.sched_getaffinity(0)), cpu_quota()
        asked = config.cpu.cores or _cores_left(config, allowed, quota)
        shares = share_cores(asked, allowed, quota, config.parallel.tensor_parallel_size)
        own = shares[0]
        if config.parallel.tensor_parallel_size > 1:
            ranks = stack.enter_context(running_ranks(config, launch.folder, shares, wake_up.fd, life))
        pin_to_cores(own.cores)
        # torch is imported late: it sizes its thread pool by the cores that it finds then, and loading it takes seconds
        # in which the API process already waits for a message.
        with loading_libraries():
            import_torch()
            import torch

            from pdserve.engine.assembly import assemble
            from pdserve.engine.runner_loading import rank_device
            from pdserve.engine.tp.tp_runner import joined_group

        # Without cores of its own, an engine keeps to what OMP_NUM_THREADS says, too.
        torch.set_num_threads(own.threads if own.cores else min(own.threads, torch.get_num_threads()))
        device = rank_device(config, 0)
        compute = None
        if device.type == "cpu":
            if note := quota_note(config.cpu.cores, allowed, quota):
                log.log(logging.WARNING if config.cpu.cores else logging.INFO, "%s", note)
            compute = _compute_cores(shares, allowed, torch.get_num_threads())
        group = stack.enter_context(joined_group(config, ranks, device))

        def progress(stage: str) -> None:
            channel.send(Starting(stage))

        engine = assemble(config, channel, wake_up, progress, ranks, group, device, life, around)
        stack.callback(engine.cores.close)
        stack.callback(engine.connector.close)
        stack.enter_context(_stop_signals(engine.loop.stop))
        if ranks is not None:
            ranks.notify(engine.loop.stop)
        # Engines that were started together have their cores by now.
        others = [] if compute is None or 0 < quota < len(allowed) else other_engines(os.getpid())
        if compute is not None and (note := sharing_note(compute.cores, others)):
            log.warning("%s", note)
        ready = msgspec.structs.replace(engine.ready, compute=compute)
        try:
            with life.sign(step_loop(0)).shown_by_this_thread(computes=device.type == "cpu"):
                # The objects of a step are more than Python's own number, and next to none are in cycles.
                collect_rarely()
                channel.send(ready)
                engine.loop.run()
            if ranks is not None:
                ranks.check()
        except Exception as exc:
            raise _ServingFailed(exc, stack.pop_all()) from exc


def _cores_left(config: EngineConfig, allowed: Sequence[int], quota: float) -> tuple[int, ...]:
    """Returns the cores that other engines of this machine leave, and says so; none if they have none of their own.

    A quota of CPU time says how much this engine may compute, whatever others do, and a GPU needs few cores.
    """
    if config.model.device is Device.CUDA or 0 < quota < len(allowed):
        return ()
    if config.model.device is Device.AUTO and NVIDIA_DRIVER.exists():
        return ()
    left = cores_left(allowed, other_engines(os.getpid()))
    if len(left) == len(allowed):
        return ()
    log.info("this engine takes cores %s, which other engines of this machine leave; --cores chooses", core_words(left))
    return tuple(left)


def _compute_cores(shares: Sequence[CoreShare], allowed: Sequence[int], own_threads: int) -> ComputeCores:
    cores = {core for share in shares for core in share.cores or allowed}
    threads = own_threads + sum(share.threads for share in shares[1:])
    return ComputeCores(machine_id(), tuple(sorted(cores)), threads)


@contextmanager
def _stop_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Lets SIGTERM and SIGINT stop the loop after the step under way."""
    before = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
