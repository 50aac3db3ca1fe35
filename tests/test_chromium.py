"""A browser that is a script's child ends with the script, as Debian's does not by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.chromium import end_group, group_members
from tests.processes import alive


async def test_what_a_script_has_started_ends_with_it(tmp_path: Path) -> None:
    script = tmp_path / "browser"
    script.write_text("#!/bin/sh -e\n\nsleep 1000 & echo $!; wait\n")
    script.chmod(0o755)
    process = await asyncio.create_subprocess_exec(script, stdout=asyncio.subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    child = int(await process.stdout.readline())
    assert child in group_members(process.pid)
    await end_group(process)
    assert not alive(child)
    assert process.returncode is not None
    await end_group(process)
