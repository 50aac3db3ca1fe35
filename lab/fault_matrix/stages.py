"""Keeps a cluster for one cell after the other, and builds another one when a cell has left it broken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from lab.fault_matrix.client import NEW_TOKENS
from lab.fault_matrix.models import Saved
from lab.fault_matrix.scenario import Answers, play
from lab.fault_matrix.stage import Stage, stage
from lab.fault_matrix.table import Cell, Victim
from tests.tiny_models import Reference


class Stages:
    """One stage at a time. Used as a context manager."""

    def __init__(self, model: Saved, folders: Callable[[], Path]) -> None:
        """``folders`` makes a new folder."""
        self._model = model
        self._folders = folders
        self._answers = Answers(Reference(model.folder, NEW_TOKENS))
        self._open = ExitStack()
        self._ranks = 0
        self._stage: Stage | None = None
        self.folder = Path()
        """Where the logs of the last cluster are."""

    def __enter__(self) -> Stages:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def play(self, cell: Cell) -> float:
        """Plays a cell, and returns how long its client has waited for what the fault held up."""
        ranks = 2 if cell.victim is Victim.RANK else 1
        if self._stage is None or ranks != self._ranks:
            self._close()
            self.folder = self._folders()
            self._stage = self._open.enter_context(stage(self._model, self.folder, ranks=ranks))
            self._ranks = ranks
        try:
            return play(self._stage, cell, self._answers)
        except BaseException:
            self._close()
            raise

    def accepted_drafts(self) -> float:
        """Returns how many drafts the decode nodes have accepted that run now."""
        assert self._stage is not None
        name = "spec_decode_num_accepted_tokens_total"
        return sum(node.metric(name) for node in self._stage.of_role("decode"))

    def _close(self) -> None:
        self._stage = None
        self._open.close()
