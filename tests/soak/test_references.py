"""The reference answers of a soak: which requests are asked, because their answers are the same beside others."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from lab.soak.catalogue import Ask
from lab.soak.clients import connections
from lab.soak.run import References, compare_in_crowd
from tests.soak.test_clients import RIGHT, Script, chunk, served, streams

STEADY = Ask("stream-0", "/v1/completions", {"model": "soak", "prompt": [5], "stream": True})
UNSTEADY = Ask("stream-1", "/v1/completions", {"model": "soak", "prompt": [6], "stream": True})


async def test_a_request_whose_answer_differs_beside_others_is_told_from_one_whose_answer_does_not() -> None:
    salts = set[str]()

    async def answer(request: web.BaseRequest) -> Any:
        asked = await request.json()
        salts.add(asked["cache_salt"])
        last = "two " if asked["prompt"] == [5] else "too "
        return await streams(chunk("one "), chunk(last, "length"), b"data: [DONE]\n\n")(request)

    references = References({STEADY.name: RIGHT, UNSTEADY.name: RIGHT})
    script = Script([answer] * 4)
    async with served(script) as door, connections() as session:
        for number in range(2):
            await compare_in_crowd(session, door.url, [STEADY, UNSTEADY], number, references)
    assert references.unsteady.keys() == {UNSTEADY.name}
    assert "not 'wo '" in references.unsteady[UNSTEADY.name]
    assert len(salts) == 2, "each crowd computes its prompts anew"
