"""guidellm: a short load of streamed text completions, of which every request has to succeed."""

from __future__ import annotations

import json

from lab.compat.programs.checks import Server, run_checks
from lab.compat.programs.commands import run_command

REQUESTS = 6


def benchmark(server: Server) -> None:
    report = server.cache / "guidellm.json"
    backend = f"kind=openai_http,target={server.url},model={server.model},request_format=/v1/completions"
    asked = ["--backend", backend, "--profile", "kind=concurrent,streams=2"]
    asked += ["--constraint", f"kind=max_requests,count={REQUESTS}", "--disable-progress"]
    asked += ["--tokenizer", f"kind=huggingface_auto,model={server.tokenizer}"]
    asked += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    run_command(server.cache, "guidellm", "run", *asked, "--output", f"kind=json,path={report}")
    requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
    assert len(requests["successful"]) == REQUESTS and not requests["errored"], requests


if __name__ == "__main__":
    run_checks((benchmark,))
