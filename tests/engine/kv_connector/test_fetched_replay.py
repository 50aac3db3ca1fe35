"""A prompt comes from a prefill engine over real UCX, and the answer goes on after tokens that a client has already."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.wire.engine import PrefillSource
from pdserve.wire.sampling_params import SamplingParams
from pdserve_kvtransfer.ucx.ucx_transport import UcxTransport
from tests.engine.kv_connector.test_connectors_faulty_blocks import Threads
from tests.engine.test_replay import EVERYTHING, check_rest
from tests.engine.test_step_loop import engine, prompt
from tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.integration

SAMPLING = SamplingParams(max_tokens=40, seed=1, **EVERYTHING)


@pytest.mark.parametrize("length", [16, 30, 33])
def test_answers_to_a_fetched_prompt_go_on(length: int, tmp_path: Path) -> None:
    folder, family = save_tiny_model("llama", tmp_path), [(prompt(length), SAMPLING, (2, 3))]
    with engine(folder, overlap=False) as mixed:
        whole = list(mixed.together(family).values())
    threads = Threads()
    with (
        engine(folder, overlap=False, connect=threads.connector(True, lambda: UcxTransport(""))),
        engine(folder, overlap=False, connect=threads.connector(False, lambda: UcxTransport(""))) as decode,
    ):
        assert threads.target is not None
        decode.targets = (threads.target,)
        for shares in ((0.0, 0.0, 0.0), (0.1, 0.0, 0.5), (0.0, 0.7, 0.2), (0.9, 0.9, 0.9)):
            cuts = [int(share * len(one.tokens)) for share, one in zip(shares, whole, strict=True)]
            emitted = [[one.tokens[:cut] for one, cut in zip(whole, cuts, strict=True)]]
            # A salt of its own: the prompt has to come.
            got = decode.together(family, str(cuts), emitted)
            for mine, one, cut in zip(got.values(), whole, cuts, strict=True):
                check_rest(mine, one, cut)
                assert mine.end.report is not None
                assert mine.end.report.prefill_source is PrefillSource.REMOTE
