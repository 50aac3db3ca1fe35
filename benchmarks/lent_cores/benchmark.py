"""Times steps with borrowed cores, and how soon their owner has them back.

The other engine computes and sleeps in a process of its own, ``neighbour_program``.
"""

from __future__ import annotations

import os
import select
import statistics
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from benchmarks.programs import study_program
from benchmarks.settings import BenchLentCoresConfig
from pdserve.bench.engine.parts import seconds_of
from pdserve.bench.engine.subject import Steps, Subject, open_subject
from pdserve.bench.report import Better, Figure, Report, Row, Unit, chip_name, this_machine
from pdserve.errors import BenchError
from pdserve.machine.core_ledger import CoreLedger, private_ledger
from pdserve.models.checkpoint.model_files import served_model_name
from pdserve.models.runner import StepRow
from pdserve.process import partition_cores
from pdserve.settings import to_environ
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.cpu.library import LentCores

_TIMEOUT_S = 120.0
_WAKE_UPS = 20
_PAUSE_S = 0.002
_NOTES = (
    "medians; the other engine computes and sleeps in a process of its own; its wake-up ends with some 0.5 ms of work",
)


class Neighbour:
    """The process of ``neighbour_program``. The caller has to end it."""

    def __init__(self, ledger: Path, cache_dir: Path, cores: Sequence[int]) -> None:
        words = (str(ledger), str(cache_dir), ",".join(map(str, cores)))
        argv = study_program("benchmarks.lent_cores.neighbour_program", *words)
        self.popen = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def wait(self) -> str:
        """Returns the answer to the last order. Raises BenchError."""
        assert self.popen.stdout is not None
        ready, _, _ = select.select([self.popen.stdout], [], [], _TIMEOUT_S)
        line = self.popen.stdout.readline().decode().strip() if ready else ""
        if not line:
            raise BenchError("the engine whose cores are borrowed does not answer")
        return line

    def order(self, word: str) -> None:
        """Gives an order. Raises BenchError."""
        assert self.popen.stdin is not None
        try:
            self.popen.stdin.write(word.encode() + b"\n")
            self.popen.stdin.flush()
        except BrokenPipeError as exc:
            raise BenchError("the engine whose cores are borrowed has ended") from exc

    def tell(self, word: str) -> float:
        """Gives an order and returns the answer. Raises BenchError."""
        self.order(word)
        return float(self.wait())

    def end(self) -> None:
        self.popen.kill()
        self.popen.communicate()


def run(config: BenchLentCoresConfig, folder: Path, cache_dir: Path) -> Report:
    """Measures the model of ``folder`` with kernels of ``cache_dir``. Raises ModelError, ConfigError and BenchError."""
    lent = config.lent
    steps = Steps((1,), (lent.context,), lent.chunks)
    name = config.model.served_model_name or served_model_name(config.model.path, folder)
    subject = open_subject(name, folder, config.model, lent.block_size, steps, lambda: CompiledKernels(cache_dir))
    rows = lent_core_rows(subject, steps, cache_dir, lent.seconds)
    return Report("lent-cores", this_machine(chip_name()), to_environ(config), _NOTES, tuple(rows))


def lent_core_rows(subject: Subject, steps: Steps, cache_dir: Path, budget_s: float) -> list[Row]:
    """Returns a row for one decode step and one for each prefill step: on half of the cores, with the other half
    borrowed, and on all as own ones; and a row for the owner's wake-up.

    Raises BenchError, also where there is one core, or where the kernels cannot borrow any.
    """
    usable = sorted(os.sched_getaffinity(0))
    if not isinstance(subject.kernels, CompiledKernels):
        raise BenchError("this study needs the compiled CPU kernels: others cannot borrow cores")
    if len(usable) < 2:
        raise BenchError("this study needs two cores at least, and this process may use one")
    own, others = partition_cores(usable, 2)
    threads = torch.get_num_threads()
    rows = [("decode", subject.decode_rows(1, steps.contexts[0]))]
    rows += [(f"prefill of {chunk}", subject.prefill_rows(chunk)) for chunk in steps.chunks]
    try:
        with private_ledger() as path, CoreLedger(path) as ledger:
            neighbour = Neighbour(path, cache_dir, others)
            try:
                neighbour.wait()
                with _on(own), _engine(subject.kernels, ledger, own) as cores:
                    timed = [_times(subject, step, cores, neighbour, budget_s) for _, step in rows]
                    woken = _wake_ups(subject, rows[0][1], cores, neighbour)
                with _on(usable):
                    owned = [_seconds(subject, step, budget_s) for _, step in rows]
            finally:
                neighbour.end()
    finally:
        torch.set_num_threads(threads)
    at: dict[str, int | str] = {"model": subject.name, "own cores": len(own), "borrowed": len(others)}
    return [
        *(
            Row("step with borrowed cores", {**at, "step": name}, _figures(alone, lent, all_own))
            for (name, _), (alone, lent), all_own in zip(rows, timed, owned, strict=True)
        ),
        Row("owner's wake-up", at, woken),
    ]


@contextmanager
def _on(cores: Sequence[int]) -> Iterator[None]:
    """Computes on these cores within the block, with all threads: those of pools that exist already, too."""
    usual = os.sched_getaffinity(0)
    before = {}
    for thread in _threads():
        with suppress(ProcessLookupError):
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, cores)
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        # Threads that have begun within the block have the cores of the one that began them.
        for thread in _threads():
            with suppress(ProcessLookupError):
                os.sched_setaffinity(thread, before.get(thread, usual))


def _threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


@contextmanager
def _engine(kernels: CompiledKernels, ledger: CoreLedger, own: Sequence[int]) -> Iterator[LentCores]:
    engine = ledger.join(lambda dead: kernels.forget_engine(ledger.words, dead))
    cores = kernels.lent_cores(ledger.words, engine, own)
    try:
        yield cores
    finally:
        cores.close()


def _seconds(subject: Subject, step: Sequence[StepRow], budget_s: float) -> float:
    return seconds_of(lambda: subject.runner.run(step), subject.device, budget_s)


def _times(
    subject: Subject, step: Sequence[StepRow], cores: LentCores, neighbour: Neighbour, budget_s: float
) -> tuple[float, float]:
    """Returns the time of a step on own cores alone, and with those that the neighbour lends."""
    neighbour.tell("step")
    cores.begin_step()
    alone = _seconds(subject, step, budget_s)
    neighbour.tell("sleep")

    def borrowing() -> None:
        cores.begin_step()
        subject.runner.run(step)

    return alone, seconds_of(borrowing, subject.device, budget_s)


def _wake_ups(subject: Subject, step: Sequence[StepRow], cores: LentCores, neighbour: Neighbour) -> tuple[Figure, ...]:
    """Has the neighbour wake up while its cores sleep, and while they compute for this process.

    This process keeps its own cores throughout: the neighbour computes on its own ones alone in both cases.
    """
    neighbour.tell("step")
    cores.begin_step()
    alone, lent = [], []
    for _ in range(_WAKE_UPS):
        neighbour.tell("sleep")
        time.sleep(_PAUSE_S)
        alone.append(neighbour.tell("work"))
    for _ in range(_WAKE_UPS):
        neighbour.tell("sleep")
        cores.begin_step()
        subject.runner.run(step)
        neighbour.order("work")
        cores.begin_step()
        subject.runner.run(step)
        lent.append(float(neighbour.wait()))
    free, taken = statistics.median(alone), statistics.median(lent)
    return (
        Figure("its cores asleep", free * 1e3, Unit.MS, Better.LOWER),
        Figure("its cores lent", taken * 1e3, Unit.MS, Better.LOWER),
        Figure("lent : asleep", taken / free, Unit.RATIO, Better.LOWER),
    )


def _figures(alone: float, lent: float, all_own: float) -> tuple[Figure, ...]:
    return (
        Figure("own cores", alone * 1e3, Unit.MS, Better.LOWER),
        Figure("and borrowed", lent * 1e3, Unit.MS, Better.LOWER),
        Figure("all own", all_own * 1e3, Unit.MS, Better.LOWER),
        Figure("own : borrowed", alone / lent, Unit.RATIO, Better.HIGHER),
        Figure("all own : borrowed", all_own / lent, Unit.RATIO, Better.HIGHER),
    )
