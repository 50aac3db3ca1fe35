"""Tests on a GPU that a node without any sizes takes its share of the memory, has large steps, and answers."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import torch

from tests.processes import pdserve

GIB = 2**30


def free_memory() -> int:
    return torch.cuda.mem_get_info(0)[0]


def test_nodes_that_are_told_nothing_share_a_gpu_and_answer(tiny_model: Path, tmp_path: Path) -> None:
    free, total = torch.cuda.mem_get_info(0)
    flags = ("--port", "0", "--model", str(tiny_model))
    with pdserve("up", *flags, XDG_STATE_HOME=str(tmp_path)) as up:
        line = up.wait_for(lambda line: line.startswith("OpenAI-compatible API: "))
        url = line.removeprefix("OpenAI-compatible API: ").removesuffix("/v1")
        with urllib.request.urlopen(f"{url}/instances", timeout=10) as response:
            nodes = [instance["url"] for instance in json.load(response)]
        sizes = []
        for node in nodes:
            with urllib.request.urlopen(f"{node}/server_info", timeout=10) as response:
                sizes.append(json.load(response)["sizes"])
        taken = free - free_memory()
        body = json.dumps({"model": sizes[0]["model"], "prompt": "How do you do?", "max_tokens": 8}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            assert json.load(response)["usage"]["completion_tokens"] > 0
        print(f"of {total / GIB:.1f} GiB the nodes took {taken / GIB:.1f}: {sizes}")
    assert [(size["step_tokens"], size["places"]) for size in sizes] == [(8192, 256)] * 2
    # Each node has its half of 0.9, and what CUDA itself takes comes on top.
    assert 0.7 * total < taken < 0.95 * total
