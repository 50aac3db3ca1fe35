"""A program that computes one model on several ranks, each of which is a fork of it, and prints what rank 0 got.

``processes.lean_torch_command`` runs it. One process imports torch for all ranks. Standard input has a list of
``Case`` and standard output gets a list of ``Result``, both as JSON.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import msgspec
import torch

from pdserve.config import Dtype, ParallelConfig, TpBackend
from pdserve.errors import PdserveError
from pdserve.models.checkpoint.config_reading import read_decoder_config
from pdserve.models.runner import DraftRow, ModelRunner, StepRow
from pdserve.models.tp.rank_board import RankBoard
from pdserve.models.tp.shares import ALONE, TpGroup
from pdserve.models.tp.tp_groups import open_group
from pdserve_kernels.cpu.torch_kernels import TorchKernels
from tests.models.grouped_runner import GroupedRunner

BLOCK_SIZE, BLOCKS_EACH = 4, 16


class Case(msgspec.Struct, frozen=True):
    folder: str
    tp: int
    prompts: list[list[int]]
    new_tokens: int
    backend: TpBackend = TpBackend.SHM
    drafts: int = 0
    """How many tokens are drafted behind each; 0 to load no layer for that."""


class Result(msgspec.Struct, frozen=True):
    tokens: list[list[int]]
    error: str = ""
    drafts: list[list[int]] = []
    """Those of all steps, of which each has one list for each prompt."""


def greedy(runner: ModelRunner, group: TpGroup, case: Case) -> Result:
    """Returns the tokens that follow each prompt. Prompts have two chunks, and all second ones share a step."""
    prompts = case.prompts
    tables = [list(range(i * BLOCKS_EACH, (i + 1) * BLOCKS_EACH)) for i in range(len(prompts))]
    for prompt, table in zip(prompts, tables, strict=True):
        runner.run([StepRow(prompt[:5], 0, table, False)])
        if case.drafts:
            runner.draft([DraftRow(0, prompt[1:6], False)], case.drafts)
    rows = [StepRow(prompt[5:], 5, table, True) for prompt, table in zip(prompts, tables, strict=True)]
    answers, drafts = [list[int]() for _ in prompts], list[list[int]]()
    for _ in range(case.new_tokens):
        logits = runner.run(rows)
        # The other ranks get the tokens from rank 0, as they do in an engine.
        best = logits.argmax(1).float() if group.rank == 0 else torch.zeros(len(prompts))
        tokens = group.all_reduce(best).int().tolist()
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(token)
        if case.drafts:
            known = [[*row.token_ids[1:], token] for row, token in zip(rows, tokens, strict=True)]
            drafts += runner.draft([DraftRow(i, known[i], True) for i in range(len(rows))], case.drafts)
        rows = [
            StepRow([token], row.context_len, row.block_table, True) for row, token in zip(rows, tokens, strict=True)
        ]
    return Result(answers, drafts=drafts)


def compute(case: Case, group: TpGroup) -> Result:
    folder = Path(case.folder)
    try:
        runner = GroupedRunner(
            *(folder, read_decoder_config(folder), Dtype.FP32, BLOCK_SIZE, 64, 128, TorchKernels()),
            tp=group,
            drafts=case.drafts > 0,
        )
        return greedy(runner, group, case)
    except PdserveError as exc:
        return Result([], str(exc))


def split(case: Case) -> Result:
    """Computes the case on its ranks. This process is rank 0."""
    if case.tp == 1:
        return compute(case, ALONE)
    config = ParallelConfig(tensor_parallel_size=case.tp, backend=case.backend)
    board = RankBoard.create(case.tp)
    with tempfile.TemporaryDirectory() as folder, closing(board):
        children: list[int] = []
        for rank in range(1, case.tp):
            child = os.fork()
            if child == 0:
                with closing(open_group(config, rank, board, Path(folder, "ranks"))) as group:
                    compute(case, group)
                os._exit(0)
            children.append(child)
        with closing(open_group(config, 0, board, Path(folder, "ranks"))) as group:
            result = compute(case, group)
        for child in children:
            _, status = os.waitpid(child, 0)
            if status:
                return Result([], f"a rank ended with status {status}")
        return result


def main() -> None:
    torch.set_num_threads(1)
    cases = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Case])
    sys.stdout.buffer.write(msgspec.json.encode([split(case) for case in cases]))
