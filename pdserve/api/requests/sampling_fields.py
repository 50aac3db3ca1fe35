"""Turns a validated request's fields into the sampling parameters of its engine requests.

Words that an answer must not hold become the runs of tokens that the engine keeps out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import TypeAlias

from pdserve.api.requests.openai_request import ChatRequest, CompletionRequest, GenerationRequest
from pdserve.api.requests.prompts import Prompt
from pdserve.api.requests.tokenizer import Tokenizer
from pdserve.errors import InvalidRequest
from pdserve.wire.sampling_params import Grammar, SamplingParams

TokenRuns: TypeAlias = tuple[tuple[int, ...], ...]


def bad_word_tokens(words: Iterable[str], tokenizer: Tokenizer) -> TokenRuns:
    """Returns the tokens of each word as it is, and as it comes after a space.

    The same word cut into other tokens is not kept out.
    """
    runs = []
    for word in words:
        for form in (word, " " + word.lstrip()):
            runs.append(tuple(tokenizer.encode(form, add_special_tokens=False)))
    return tuple(dict.fromkeys(run for run in runs if run))


SEED_MASK = 2**63 - 1
MAX_REPEATED_IDS = 262_144
MAX_SCORES = 524_288
"""How many log probabilities of prompts one answer has. As JSON they take some 40 bytes each."""
MAX_REPEATED_GRAMMAR_CHARS = 8 * 2**20
MAX_ECHOED_CHARS = 8 * 2**20
MAX_SHOWN_PROMPT_IDS = 2**20


def choice_seeds(request: GenerationRequest, answer_id: bytes, prompt: int) -> list[int]:
    """Returns a seed for each choice of the prompt of that number: ``seed``, ``seed + 1`` and so on.

    Without ``seed`` they are made of the answer's random id, so that all nodes make the same ones.
    """
    return [_seed(request.seed, answer_id, prompt, index) for index in range(request.choices)]


def check_logprobs(request: GenerationRequest) -> None:
    """Raises InvalidRequest if the fields about log probabilities do not go together."""
    match request:
        case ChatRequest(top_logprobs=int(), logprobs=None | False) if request.top_logprobs:
            raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true", param="top_logprobs")
        case CompletionRequest(max_tokens=0) if request.scored_logprobs is None:
            raise InvalidRequest(
                "'max_tokens' must be at least 1; 0 is for 'echo' with 'logprobs', and for 'prompt_logprobs'",
                param="max_tokens",
            )
    if request.logprob_token_ids and request.wanted_logprobs is None:
        raise InvalidRequest("'logprob_token_ids' needs 'logprobs'", param="logprob_token_ids")
    if request.logprob_token_ids and request.scores_only:
        raise InvalidRequest(
            "'logprob_token_ids' is of the answer's tokens, and 'max_tokens' of 0 asks for none",
            param="logprob_token_ids",
        )
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequest("'prompt_logprobs' are not available when 'stream' is true", param="prompt_logprobs")


def check_best_of(request: GenerationRequest) -> None:
    """Raises InvalidRequest if there are no ``best_of`` answers from which ``n`` can be chosen."""
    if not isinstance(request, CompletionRequest) or request.best_of is None:
        return
    if request.best_of < request.shown_choices:
        raise InvalidRequest("'best_of' must be at least 'n'", param="best_of")
    if request.stream and request.best_of > request.shown_choices:
        raise InvalidRequest("'best_of' above 'n' cannot be streamed: the best is known at the end", param="best_of")


def check_scores(request: GenerationRequest, prompts: Iterable[Sequence[int]]) -> None:
    """Raises InvalidRequest if the log probabilities of all prompts are too many together."""
    count = request.scored_logprobs
    if count is None:
        return
    entries = sum(map(len, prompts)) * request.shown_choices * (1 + count)
    if entries > MAX_SCORES:
        raise InvalidRequest(
            f"{entries} log probabilities of prompts are asked for, with those beside each token: "
            f"at most {MAX_SCORES} together",
            param="prompt_logprobs" if request.echo_logprobs is None else "logprobs",
        )


def check_repeated(request: GenerationRequest, prompts: int, bad_words: TokenRuns) -> None:
    """Raises InvalidRequest if the token ids that every prompt's parameters repeat are too many together."""
    ids = len(request.allowed_token_ids or ()) + len(request.logit_bias or ()) + len(request.stop_token_ids or ())
    ids += len(request.logprob_token_ids or ()) + sum(map(len, bad_words))
    if prompts * ids > MAX_REPEATED_IDS:
        raise InvalidRequest(
            f"{prompts} prompts with {ids} token ids each in 'allowed_token_ids', 'logit_bias', 'stop_token_ids', "
            f"'logprob_token_ids' and 'bad_words': at most {MAX_REPEATED_IDS} together",
            param="prompt",
        )


def check_shown_prompts(request: GenerationRequest, prompts: Sequence[Prompt]) -> None:
    """Raises InvalidRequest if the prompts that each choice repeats are too long together for one answer."""
    echoed = sum(len(prompt.echo) for prompt in prompts) * request.shown_choices
    if echoed > MAX_ECHOED_CHARS:
        raise InvalidRequest(
            f"'echo' repeats {echoed} characters of prompts: at most {MAX_ECHOED_CHARS} in all choices together",
            param="echo",
        )
    ids = sum(len(prompt.token_ids) for prompt in prompts) * request.shown_choices
    if request.return_token_ids and isinstance(request, CompletionRequest) and ids > MAX_SHOWN_PROMPT_IDS:
        raise InvalidRequest(
            f"'return_token_ids' repeats {ids} token ids of prompts: at most {MAX_SHOWN_PROMPT_IDS} in all choices "
            "together",
            param="return_token_ids",
        )


def check_repeated_grammar(grammar: Grammar, prompts: int) -> None:
    """Raises InvalidRequest if the grammar that every prompt repeats is too long for so many."""
    if prompts * len(grammar.text) > MAX_REPEATED_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"{prompts} prompts with a grammar of {len(grammar.text)} characters: at most "
            f"{MAX_REPEATED_GRAMMAR_CHARS} together",
            param="prompt",
        )


def _seed(seed: int | None, answer_id: bytes, prompt: int, index: int) -> int:
    if seed is None:
        place = blake2b(b"%d %d" % (prompt, index), key=answer_id, digest_size=8)
        return int.from_bytes(place.digest()) & SEED_MASK
    return (seed + index) & SEED_MASK


def sampling_params(request: GenerationRequest, seed: int, max_tokens: int, bad_words: TokenRuns) -> SamplingParams:
    """Returns the sampling parameters of one choice."""
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(request.top_k or 0, 0),
        min_p=_or(request.min_p, 0.0),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        min_tokens=request.min_tokens or 0,
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=tuple((request.logit_bias or {}).items()),
        allowed_token_ids=tuple(sorted(set(request.allowed_token_ids or ()))),
        bad_words=bad_words,
        logprobs=request.sampled_logprobs,
        logprob_token_ids=tuple(dict.fromkeys(request.logprob_token_ids or ())),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
