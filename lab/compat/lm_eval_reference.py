"""What transformers itself computes for lm-eval's questions: log likelihoods of the choices, and greedy texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

QUESTIONS = Path(__file__).parent / "programs" / "lm_eval_questions" / "questions.jsonl"
NEW_TOKENS = 12
STOP = "\n"


class Question(msgspec.Struct, frozen=True):
    """One line of the file of questions."""

    question: str
    choices: tuple[str, ...]
    answer: int


class Choices(msgspec.Struct, frozen=True):
    """The multiple-choice task: each question's log likelihoods, and the share of right answers."""

    log_likelihoods: list[list[float]]
    accuracy: float


class Generates(msgspec.Struct, frozen=True):
    """The generating task: each question's text."""

    texts: list[str]


class Reference(msgspec.Struct, frozen=True):
    """The file that the program for lm-eval reads."""

    choices: Choices
    generates: Generates


def write_reference(model_dir: Path, path: Path) -> None:
    """Writes what the model in ``model_dir`` says to the questions, in fp32."""
    library: Any = transformers
    tokenizer = library.AutoTokenizer.from_pretrained(model_dir)
    model = library.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    questions = msgspec.json.Decoder(Question).decode_lines(QUESTIONS.read_bytes())
    likelihoods = [
        [_log_likelihood(model, tokenizer, found.question, f" {choice}") for choice in found.choices]
        for found in questions
    ]
    right = [scores.index(max(scores)) == found.answer for scores, found in zip(likelihoods, questions, strict=True)]
    texts = [_greedy(model, tokenizer, found.question) for found in questions]
    reference = Reference(Choices(likelihoods, sum(right) / len(right)), Generates(texts))
    path.write_bytes(msgspec.json.encode(reference))


def _log_likelihood(model: Any, tokenizer: Any, context: str, continuation: str) -> float:
    before = len(tokenizer(context).input_ids)
    tokens = torch.tensor([tokenizer(context + continuation).input_ids])
    with torch.inference_mode():
        scores = torch.log_softmax(model(tokens).logits[0, :-1], -1)
    chosen = scores.gather(1, tokens[0, 1:, None])[before - 1 :]
    return float(chosen.sum())


def _greedy(model: Any, tokenizer: Any, prompt: str) -> str:
    tokens = torch.tensor([tokenizer(prompt).input_ids])
    limits = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **limits)[0, tokens.shape[1] :]
    text: str = tokenizer.decode(found, skip_special_tokens=True)
    return text.partition(STOP)[0]
