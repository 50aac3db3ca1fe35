"""Tests that a random model's answers follow random schemas, in batches, after preemptions and after resumes."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pdserve.wire.engine import FinishReason
from pdserve.wire.sampling_params import Grammar, GrammarKind, SamplingParams
from tests.engine.test_step_loop import Answer, engine, prompt
from tests.tiny_models import save_tiny_model
from tests.tiny_vocabulary import FIRST_BYTE, tiny_text

pytestmark = pytest.mark.integration  # for the seconds that it takes

BATCH = 8
TOKENS = 110
SPACES = tuple((FIRST_BYTE + byte, -60.0) for byte in b" \t\n")
"""A random model likes spaces as much as anything else, and its answers would be full of them."""


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Returns a schema whose texts are mostly short."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    match rng.choice(kinds + ["object", "array", "tuple", "any_of"] * (2 if depth < 3 else 0)):
        case "string":
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-d]{1,3}$", "^(a|bc)+d{0,2}$", "^[0-9]{2}-[0-9]{2}$"])}
        case "integer":
            low = rng.randint(-20, 20)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2_000)}
        case "number":
            return {"type": "number", "exclusiveMinimum": 0, "maximum": rng.choice([1, 2.5, 99])}
        case "enum":
            return {"enum": rng.sample(["a", "b c", "é", 1, -2.5, None, True, [1], {"k": "v"}], rng.randint(1, 4))}
        case "const":
            return {"const": rng.choice(["fixed", 7, None, ["x", {"y": 1}]])}
        case "array":
            low = rng.randint(0, 2)
            return {
                "type": "array",
                "items": random_schema(rng, depth + 1),
                "minItems": low,
                "maxItems": low + rng.randint(0, 2),
            }
        case "tuple":
            items = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        case "any_of":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case "object":
            names = rng.sample(["a", "bb", "c d", "é", "properties", "x-1"], rng.randint(0, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": [name for name in names if rng.random() < 0.6],
                "additionalProperties": rng.random() < 0.1,
            }
        case other:
            return {"type": other}


def sampling(schema: dict[str, Any], seed: int) -> SamplingParams:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    return SamplingParams(max_tokens=TOKENS, seed=seed, temperature=1.0, grammar=grammar, logit_bias=SPACES)


def check_follows(answer: Answer, schema: dict[str, Any], tokens: list[int]) -> bool:
    """Checks a whole answer. Returns False if its end was not reached."""
    if answer.end.finish is FinishReason.LENGTH:
        return False
    assert answer.end.finish is FinishReason.STOP, (answer.end.error, schema)
    jsonschema.validate(json.loads(tiny_text(tokens)), schema)
    return True


@dataclass
class Count:
    """The number of answers that came to their end, and of those that were the same when they were resumed."""

    whole: int = 0
    alike: int = 0


def check_random_schemas(folder: Path, seeds: range, num_blocks: int) -> Count:
    """Checks answers by one schema a seed, whole and resumed in the middle."""
    count = Count()
    with engine(folder, overlap=False, num_blocks=num_blocks) as client:
        for first in range(seeds.start, seeds.stop, BATCH):
            batch = range(first, min(first + BATCH, seeds.stop))
            schemas = [random_schema(random.Random(seed)) for seed in batch]
            asked = [(prompt(9), sampling(schema, seed), ()) for seed, schema in zip(batch, schemas, strict=True)]
            answers = list(client.together(asked).values())
            emitted = [one.tokens[: len(one.tokens) // 2] for one in answers]
            resumed = list(client.together(asked, "resumed", [[tokens] for tokens in emitted]).values())
            for schema, known, one, rest in zip(schemas, emitted, answers, resumed, strict=True):
                count.whole += check_follows(one, schema, one.tokens)
                check_follows(rest, schema, known + rest.tokens)
                count.alike += known + rest.tokens == one.tokens
    return count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def test_answers_follow_random_schemas(folder: Path) -> None:
    count = check_random_schemas(folder, range(40), num_blocks=300)
    assert count.whole >= 30
    assert count.alike == 40


def test_preempted_answers_follow_random_schemas(folder: Path) -> None:
    schemas = [{"type": "array", "items": {"enum": ["ab", "cd", 1]}, "minItems": 12 + i} for i in range(6)]
    asked = [(prompt(20), sampling(schema, seed), (90,)) for seed, schema in enumerate(schemas)]
    with engine(folder, overlap=False, num_blocks=300) as roomy:
        wanted = [one.tokens for one in roomy.together(asked).values()]
    with engine(folder, overlap=False, num_blocks=64) as tight:
        answers = list(tight.together(asked).values())
        tight.wait_for_a_preemption()
    assert [one.tokens for one in answers] == wanted
    whole = [check_follows(one, schemas[i // 2], one.tokens) for i, one in enumerate(answers)]
    assert any(whole)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_answers_follow_a_thousand_random_schemas(folder: Path) -> None:
    count = check_random_schemas(folder, range(1_000, 2_000), num_blocks=300)
    assert count.whole >= 700
    # Batches differ, so logits are rounded otherwise, and one draw in some ten thousand falls between two tokens.
    assert count.alike >= 990
