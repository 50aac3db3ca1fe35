"""Tests, without podman, that the end of a process is noticed when it happens."""

from __future__ import annotations

import asyncio

from lab.deploy_containers.stand_in.podman import watched


async def test_a_process_that_is_killed_has_ended() -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    with watched(process.pid) as ended:
        assert not ended.is_set()
        process.kill()
        async with asyncio.timeout(30):
            await ended.wait()
    await process.wait()


async def test_a_process_that_is_gone_has_ended() -> None:
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    for pid in (0, process.pid):
        with watched(pid) as ended:
            assert ended.is_set()
