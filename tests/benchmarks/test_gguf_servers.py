"""``benchmarks gguf-servers`` as a person runs it, with another node of pdserve as the peer; its files are read."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.random_gguf import SHAPES, write_gguf
from pdserve.bench.report import read_report
from pdserve.process import pdserve_command
from tests.benchmarks.studies import run_study
from tests.models.greedy import greedy_tokens, small_runner

OFTEN = ("gpt-oss", "qwen3next")
"""Matrices in eights and experts in MXFP4, and states: what the other shapes have lies between them."""


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=() if shape in OFTEN else pytest.mark.nightly) for shape in SHAPES]
)
def test_a_file_of_each_shape_is_a_model(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "random.gguf"
    write_gguf(replace(SHAPES[shape], layers=4, experts=SHAPES[shape].experts and 8), path)
    assert len(set(greedy_tokens(small_runner(path), [5, 700, 31, 9000], 4))) > 1


@pytest.mark.integration
@pytest.mark.nightly
def test_both_servers_are_asked_in_turns(tmp_path: Path) -> None:
    peer = f"{shlex.join(pdserve_command('mixed'))} --model {{model}} --port {{port}} --speculation off"
    flags = ("--shapes", "olmo2", "--clients", "1,2", "--requests", "1", "--rounds", "1")
    lengths = ("--prompt-tokens", "8", "--output-tokens", "4")
    files = ("--peer-command", peer, "--json", "gguf-servers.json")
    run_study("gguf-servers", *flags, *lengths, *files, folder=tmp_path, timeout_s=240)
    rows = read_report(tmp_path / "gguf-servers.json").rows_of("olmo2")
    assert [row.at["clients"] for row in rows] == [1, 2]
    for row in rows:
        ratio = row.figure("pdserve, output").value / row.figure("peer, output").value
        assert row.figure("times better").value == pytest.approx(ratio)
