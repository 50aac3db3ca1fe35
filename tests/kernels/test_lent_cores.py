"""Tests that engines lend each other their cores, with real processes, and that results do not depend on that."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pdserve.config import Dtype
from pdserve.engine.core_lending import LedgerCores
from pdserve.machine.core_ledger import CoreLedger, CoreState, CoreWord
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import ModelRunner, StepRow
from pdserve_kernels.contract import AttentionRow, BlockFormat
from pdserve_kernels.cpu.compiled_kernels import CompiledKernels
from pdserve_kernels.cpu.library import LentCores
from pdserve_kernels.feed_forward import Activation
from pdserve_kernels.kv_layout import KvLayout
from tests.core_words import write
from tests.eventually import eventually
from tests.kernels.random_blocks import random_blocks
from tests.nightly import nightly
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.integration
CORE = min(os.sched_getaffinity(0))
"""The core that is lent. Where engines have none of their own, one core is enough for these tests."""
PATIENCE_S = 200.0
"""A busy machine takes long to run a thread beside many others. The test itself may take 300 s."""
FREE, OWNED, LENT, WANTED, SHARED = (
    CoreState.FREE,
    CoreState.OWNED,
    CoreState.LENT,
    CoreState.WANTED,
    CoreState.SHARED,
)


IN_CONTAINER = ("unshare", "--fork", "--kill-child", "--pid", "--mount", "--mount-proc", "--ipc", "--uts")
"""Runs a process in namespaces of its own, as a container has them: it shares files, and the machine's cores."""


class Neighbour:
    """The process of ``core_neighbour``, below the command ``inside`` if there is one."""

    def __init__(self, path: Path, *own: int, inside: Sequence[str] = ()) -> None:
        argv = [*inside, sys.executable, "-m", "tests.kernels.core_neighbour", str(path), ",".join(map(str, own))]
        self._popen = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.engine = int(self._answer())

    def tell(self, order: str) -> None:
        self.begin(order)
        self.wait()

    def begin(self, order: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(order + "\n")
        self._popen.stdin.flush()

    def wait(self) -> None:
        self._answer()

    def die(self) -> None:
        self._popen.kill()
        self._popen.communicate()

    def _answer(self) -> str:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert line, "the neighbour has ended"
        return line


@functools.cache
def why_no_container() -> str | None:
    """Returns why this machine gives processes no namespaces of their own, or None if it does."""
    try:
        subprocess.run([*IN_CONTAINER, "true"], check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.CalledProcessError) as exc:
        return f"namespaces cannot be made here: {getattr(exc, 'stderr', None) or exc}"
    return None


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[CoreLedger]:
    with CoreLedger(tmp_path / "ledger") as opened:
        yield opened


IN_A_PROCESS = pytest.mark.parametrize(
    "neighbour", [(), nightly(IN_CONTAINER)], ids=["process", "container"], indirect=True
)
"""It is for tests in which nothing depends on whether a container's process is there. Others show that it is seen."""


@pytest.fixture(params=[nightly(()), IN_CONTAINER], ids=["process", "container"])
def neighbour(tmp_path: Path, ledger: CoreLedger, request: pytest.FixtureRequest) -> Iterator[Neighbour]:
    """Yields an engine that owns ``CORE``. Namespaces need root, which CI has."""
    if request.param and (why := why_no_container()) is not None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    started = Neighbour(tmp_path / "ledger", CORE, inside=request.param)
    yield started
    started.die()


def forget(compiled: CompiledKernels, ledger: CoreLedger) -> Callable[[int], None]:
    return lambda engine: compiled.forget_engine(ledger.words, engine)


@contextmanager
def this_engine(compiled: CompiledKernels, ledger: CoreLedger, *own: int) -> Iterator[LentCores]:
    """Makes this process an engine that owns these cores."""
    engine = ledger.join(forget(compiled, ledger))
    cores = compiled.lent_cores(ledger.words, engine, own)
    try:
        yield cores
    finally:
        cores.close()


def word(ledger: CoreLedger) -> CoreWord:
    return ledger.read()[CORE]


def becomes(ledger: CoreLedger, expected: CoreWord) -> None:
    """A helper gives its core back by itself, and may be in the middle of that for as long as it gets no time."""
    eventually(lambda: word(ledger) == expected, str(expected), PATIENCE_S)


@IN_A_PROCESS
def test_a_sleeping_engines_core_is_lent_and_wanted_back(
    compiled: CompiledKernels, ledger: CoreLedger, neighbour: Neighbour
) -> None:
    with this_engine(compiled, ledger) as cores:
        owner, own = neighbour.engine, ledger.engine
        cores.begin_step()
        assert (word(ledger), cores.borrowed) == (CoreWord(OWNED, owner, 0), 0)
        neighbour.tell("sleep")
        assert word(ledger) == CoreWord(FREE, owner, 0)
        cores.begin_step()
        assert (word(ledger), cores.borrowed) == (CoreWord(LENT, owner, own), 1)
        assert cores.borrowed_s > 0
        neighbour.tell("step")
        # The helper gives it back by itself if it is awake, and otherwise the next step does.
        assert word(ledger) in (CoreWord(WANTED, owner, own), CoreWord(OWNED, owner, 0))
        cores.begin_step()
        becomes(ledger, CoreWord(OWNED, owner, 0))
        assert cores.borrowed == 0
        neighbour.tell("sleep")
        cores.begin_step()
        cores.sleep()
        becomes(ledger, CoreWord(FREE, owner, 0))
        assert cores.borrowed == 0
        neighbour.tell("close")
        assert word(ledger) == CoreWord(CoreState.NOBODYS, 0, 0)


def test_this_engine_lends_too(compiled: CompiledKernels, ledger: CoreLedger, tmp_path: Path) -> None:
    with this_engine(compiled, ledger, CORE) as cores:
        own, other = ledger.engine, Neighbour(tmp_path / "ledger")
        assert word(ledger) == CoreWord(OWNED, own, 0)
        cores.sleep()
        other.tell("step")
        assert word(ledger) == CoreWord(LENT, own, other.engine)
        cores.begin_step()
        assert word(ledger).owner == own
        cores.sleep()
        cores.sleep()
        assert word(ledger).state in (LENT, FREE)
        other.die()
        # A dead borrower keeps nothing: this engine does not wait for it, and gives the core to others again.
        write(ledger, CORE, CoreWord(LENT, own, other.engine))
        cores.begin_step()
        assert word(ledger) == CoreWord(WANTED, own, other.engine)
        ledger.forget_dead(forget(compiled, ledger))
        assert word(ledger) == CoreWord(OWNED, own, 0)
    assert word(ledger) == CoreWord(CoreState.NOBODYS, 0, 0)


def test_a_dead_owners_core_is_nobodys_until_it_comes_again(
    compiled: CompiledKernels, ledger: CoreLedger, neighbour: Neighbour, tmp_path: Path
) -> None:
    with this_engine(compiled, ledger) as cores:
        neighbour.tell("sleep")
        cores.begin_step()
        neighbour.die()
        assert word(ledger) == CoreWord(LENT, neighbour.engine, ledger.engine)
        again = Neighbour(tmp_path / "ledger", CORE)
        assert again.engine == neighbour.engine
        cores.begin_step()
        assert word(ledger) == CoreWord(OWNED, again.engine, 0)
        again.die()


@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
def test_a_core_of_two_engines_is_lent_when_the_first_has_gone(
    compiled: CompiledKernels, ledger: CoreLedger, neighbour: Neighbour, tmp_path: Path, killed: bool
) -> None:
    """A node is started before the one that it replaces ends."""
    with this_engine(compiled, ledger) as cores:
        second = Neighbour(tmp_path / "ledger", CORE)
        for engine in (neighbour, second):
            engine.tell("sleep")
            cores.begin_step()
            assert (word(ledger), cores.borrowed) == (CoreWord(SHARED, neighbour.engine, second.engine), 0)
        if killed:
            neighbour.die()
            ledger.forget_dead(forget(compiled, ledger))
        else:
            neighbour.tell("close")
        assert word(ledger) == CoreWord(OWNED, second.engine, 0)
        second.tell("sleep")
        cores.begin_step()
        assert (word(ledger), cores.borrowed) == (CoreWord(LENT, second.engine, ledger.engine), 1)
        second.die()


def test_the_third_owner_of_a_core_comes_after_the_second(
    compiled: CompiledKernels, ledger: CoreLedger, neighbour: Neighbour, tmp_path: Path
) -> None:
    second = Neighbour(tmp_path / "ledger", CORE)
    with this_engine(compiled, ledger, CORE) as cores:
        both = CoreWord(SHARED, neighbour.engine, second.engine)
        assert word(ledger) == both
        cores.sleep()
        cores.begin_step()
        assert word(ledger) == both
        second.tell("close")
        assert word(ledger) == CoreWord(OWNED, neighbour.engine, 0)
        cores.sleep()
        cores.begin_step()
        assert word(ledger) == CoreWord(SHARED, neighbour.engine, ledger.engine)
    assert word(ledger) == CoreWord(OWNED, neighbour.engine, 0)
    second.die()


def test_an_own_core_that_the_ledger_does_not_have_is_told(
    compiled: CompiledKernels, ledger: CoreLedger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cores = LedgerCores(compiled, CoreLedger(tmp_path / "ledger"), [CORE, 20_000])
    try:
        assert "cores [20000] are not lent" in caplog.text
        cores.sleep()
        assert word(ledger) == CoreWord(FREE, 1, 0)
    finally:
        cores.close()


def test_a_process_is_one_engine(compiled: CompiledKernels, ledger: CoreLedger) -> None:
    with this_engine(compiled, ledger) as cores:
        with pytest.raises(RuntimeError, match="lends its cores already"):
            compiled.lent_cores(ledger.words, 77, [])
        cores.close()
    with this_engine(compiled, ledger):
        pass


def every_kernel(compiled: CompiledKernels) -> Callable[[], list[torch.Tensor]]:
    """Returns a function that computes with every kernel that is shared, on inputs large enough to be shared."""
    torch.manual_seed(0)
    linears = [compiled.linear(torch.randn(330, 64, dtype=kind)) for kind in (torch.float32, torch.bfloat16)]
    blocks = compiled.block_linear(random_blocks(BlockFormat.Q8_0, 500, 256, 3))
    x, wide = torch.randn(40, 64), torch.randn(600, 64)
    gate_up, block_x, ids = torch.randn(600, 128), torch.randn(19, 256).bfloat16(), torch.randint(0, 500, (300,))
    weight = torch.randn(64)
    layout = KvLayout(kv_heads=2, num_layers=1, block_size=16, head_dim=32, dtype=torch.float32)
    cache = torch.randn_like(layout.allocate(80, torch.device("cpu")))
    rows = [AttentionRow(1, 700, range(44)), AttentionRow(1, 9, [50]), AttentionRow(300, 420, range(51, 78))]
    query, key_value = torch.randn(302, 4, 32), torch.randn(2, 302, 2, 32)

    def compute() -> list[torch.Tensor]:
        own = cache.clone()
        attended = compiled.plan_attention(layout, own, rows, 4, 0.2)(0, query, key_value)
        products = [linear(x.to(kind)) for linear, kind in zip(linears, (torch.float32, torch.bfloat16), strict=True)]
        return [
            *products,
            blocks(block_x),
            blocks.rows(ids),
            compiled.rms_norm(wide, weight, 1e-5),
            compiled.activated(gate_up, Activation.SILU, gated=True),
            attended,
            own,
        ]

    return compute


@IN_A_PROCESS
@pytest.mark.parametrize("threads", [1, 2])
def test_results_do_not_depend_on_borrowed_cores(
    compiled: CompiledKernels, ledger: CoreLedger, neighbour: Neighbour, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    compute = every_kernel(compiled)
    try:
        alone = compute()
        with this_engine(compiled, ledger) as cores:

            def same() -> bool:
                told = cores.borrowed_s
                cores.begin_step()
                assert all(map(torch.equal, compute(), alone))
                assert cores.borrowed_s >= told
                return cores.pieces > 100

            neighbour.tell("sleep")
            eventually(same, "the borrowed core computes", PATIENCE_S)
            # The core comes and goes in the middle of the loops.
            neighbour.begin("toggle 3000")
            for _ in range(30):
                assert same()
            neighbour.wait()
            cores.begin_step()
            cores.sleep()
            becomes(ledger, CoreWord(FREE, neighbour.engine, 0))
    finally:
        torch.set_num_threads(before)


@IN_A_PROCESS
def test_a_models_logits_do_not_depend_on_borrowed_cores(
    compiled: CompiledKernels, ledger: CoreLedger, neighbour: Neighbour, tmp_path: Path
) -> None:
    folder = save_tiny_model("llama", tmp_path / "model")
    decoder = read_decoder_config(folder)
    prompt = list(range(3, 90))

    def logits() -> list[torch.Tensor]:
        runner = ModelRunner(folder, decoder, Dtype.FP32, 16, 8, 128, compiled)
        found = [runner.run([StepRow(prompt, 0, range(8), True)]).clone()]
        found += [runner.run([StepRow([token], 87 + token, range(8), True)]).clone() for token in range(8)]
        return found

    alone = logits()
    with this_engine(compiled, ledger) as cores:
        neighbour.tell("sleep")
        cores.begin_step()
        assert cores.borrowed == 1
        assert all(map(torch.equal, logits(), alone))
