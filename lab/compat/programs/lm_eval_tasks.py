"""lm-eval through its client for text completions: two tasks from local files, and the scores that transformers gets.

The reference is written by ``lab/compat/lm_eval_reference.py``, which has torch and reads the same questions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from lab.compat.programs.checks import Server, run_checks

TASKS = Path(__file__).parent / "lm_eval_questions"
TOLERANCE = 1e-3
"""Both compute in fp32. A sum of some tens of log probabilities differs in its last digits."""


def evaluate(server: Server, task: str) -> Any:
    arguments = {
        "model": server.model,
        "base_url": f"{server.openai_url}/completions",
        "tokenizer": str(server.tokenizer),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
        "max_retries": 1,
    }
    manager: Any = TaskManager(include_path=str(TASKS), include_defaults=False)
    return simple_evaluate(
        model="local-completions",
        model_args=",".join(f"{name}={value}" for name, value in arguments.items()),
        tasks=[task],
        task_manager=manager,
        log_samples=True,
        bootstrap_iters=0,
    )


def reference(server: Server) -> Any:
    return json.loads((server.cache / "lm_eval_reference.json").read_text())


def multiple_choice(server: Server) -> None:
    found = evaluate(server, "pdserve_choices")
    expected = reference(server)["choices"]
    samples = sorted(found["samples"]["pdserve_choices"], key=lambda sample: sample["doc_id"])
    scores = [[float(response[0][0]) for response in sample["resps"]] for sample in samples]
    for ours, theirs in zip(scores, expected["log_likelihoods"], strict=True):
        assert all(abs(a - b) < TOLERANCE for a, b in zip(ours, theirs, strict=True)), (ours, theirs)
    assert found["results"]["pdserve_choices"]["acc,none"] == expected["accuracy"], found["results"]


def generating(server: Server) -> None:
    found = evaluate(server, "pdserve_generates")
    expected = reference(server)["generates"]
    samples = sorted(found["samples"]["pdserve_generates"], key=lambda sample: sample["doc_id"])
    texts = [sample["resps"][0][0] for sample in samples]
    assert texts == expected["texts"], (texts, expected["texts"])


if __name__ == "__main__":
    run_checks((multiple_choice, generating))
