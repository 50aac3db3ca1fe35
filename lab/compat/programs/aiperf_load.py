"""aiperf: a short load of streamed chats, of which every request has to succeed."""

from __future__ import annotations

import json

from lab.compat.programs.checks import Server, run_checks
from lab.compat.programs.commands import run_command

REQUESTS = 6


def profile(server: Server) -> None:
    found = server.cache / "aiperf"
    asked = ["--model", server.model, "--url", server.url, "--tokenizer", str(server.tokenizer)]
    asked += ["--endpoint-type", "chat", "--streaming", "--request-count", str(REQUESTS), "--concurrency", "2"]
    asked += ["--isl", "40", "--osl", "8", "--ui", "none", "--artifact-dir", str(found)]
    run_command(server.cache, "aiperf", "profile", *asked)
    lines = (found / "profile_export.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == REQUESTS, records
    assert all(record.get("error") is None for record in records), records


if __name__ == "__main__":
    run_checks((profile,))
