"""Nodes for which a smaller model drafts, beside nodes without drafts: no answer says who drafted."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tests.cluster.nodes import cluster
from tests.cluster.test_group_return import MANY
from tests.cluster.test_mtp import FLAGS, OFF, PROMPTS, Mixed, accepted
from tests.eventually import eventually
from tests.faults.test_node_death import kill
from tests.models.tiny_drafting import answering_with
from tests.tiny_models import Reference, add_chat_tokenizer, save_tiny_model


def test_nobody_can_tell_that_another_model_drafts(demo_model: Path, tmp_path: Path) -> None:
    """Prompts come from a node without one. An answer begins at such a node too, and goes on where one drafts."""
    folders = {}
    for name in ("qwen3", "mistral"):
        folder = answering_with(save_tiny_model(name, tmp_path / name), range(100, 103))
        folders[name] = add_chat_tokenizer(demo_model, folder)
    model, smaller = folders.values()
    reference = Reference(model, MANY)
    wanted = [reference.answer(prompt) for prompt in PROMPTS]
    drafts = ("--draft-model", str(smaller), "--draft-tokens", "5")
    with cluster(model, *FLAGS, *OFF, decode=0, forked=True) as running, ExitStack() as stack:
        mixed = Mixed(running, model, stack, wanted)
        plain = mixed.start("plain", *OFF)
        drafting = mixed.start("drafting", *drafts, "--tensor-parallel-size", "2")
        mixed.ask([drafting, plain])
        before = accepted(drafting)
        assert before
        assert plain.metric("spec_decode_num_draft_tokens_total") == 0
        with mixed.answering_at(plain) as (lost, other):
            assert other is drafting
            kill(lost)
        eventually(lambda: accepted(drafting) > before, "drafts of the answer that went on are accepted, and counted")
