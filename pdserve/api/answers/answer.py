"""Makes the response of a completion out of text deltas: whole, or as a stream of events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence

from pdserve.api.answers.answer_form import AnswerForm, AnswerOptions
from pdserve.api.answers.chunks import DONE, ChunkEncoder, chunk_stream
from pdserve.api.answers.logprobs import WholeLogprobs
from pdserve.api.answers.openai_response import Completion, Envelope, Finish, PromptTokensDetails, Usage
from pdserve.api.answers.text_generation import TextDelta, TextGeneration
from pdserve.errors import RequestError
from pdserve.http.errors import error_event, internal_error
from pdserve.wire.journal import DONE_ENTRY, USAGE_ENTRY

log = logging.getLogger(__name__)


async def whole_answer(
    form: AnswerForm, generation: TextGeneration, first: Sequence[TextDelta], options: AnswerOptions
) -> Completion:
    """Waits for the whole answer and returns it. Raises RequestError if there is none."""
    texts = [[echo] for echo in options.echoes]
    ids: list[list[int]] = [[] for _ in texts]
    logprobs = [WholeLogprobs() for _ in texts]
    finishes: dict[int, Finish] = {}
    deltas: Sequence[TextDelta] = first
    while True:
        for delta in deltas:
            texts[delta.choice].append(delta.text)
            ids[delta.choice].extend(delta.token_ids)
            if delta.tokens:
                logprobs[delta.choice].add(form.logprobs(options.shown(delta.choice, delta.tokens)))
            if delta.outcome is not None:
                finishes[delta.choice] = delta.outcome.finish
        if generation.done and generation.failure is None:
            break
        deltas = await generation.next()
    choices = [
        form.choice(
            index,
            "".join(pieces),
            finishes[index],
            logprobs[index].encoded(form.logprobs(options.shown(index, ()))) if options.logprobs else None,
        )
        for index, pieces in enumerate(texts)
    ]
    if options.token_ids:
        for choice in choices:
            choice.token_ids, choice.prompt_token_ids = ids[choice.index], options.prompt_ids[choice.index]
    head = _envelope(form.id_prefix, form.object, options)
    return Completion(
        head.id, head.object, head.created, head.model, head.system_fingerprint, choices, usage_of(generation)
    )


async def streamed_answer(
    form: AnswerForm, generation: TextGeneration, first: Sequence[TextDelta], options: AnswerOptions
) -> AsyncGenerator[bytes, None]:
    """Yields server-sent events: one item for each time that the engine had something.

    The caller still has to close ``generation``. Raises RequestError if there is no answer and no event before that.
    """
    journaled, has, begun = options.journaled, options.journal, False
    encoder = ChunkEncoder(_envelope(form.id_prefix, form.chunk_object, options), include_usage=options.include_usage)
    stream = chunk_stream(form, encoder, options)
    deltas: Sequence[TextDelta] = first
    try:
        while True:
            if options.continuous_usage:
                encoder.use(usage_of(generation))
            data = b"".join(map(stream.events, deltas))
            if generation.done and generation.failure is None:
                break
            if data:
                begun = True
                yield data
            deltas = await generation.next()
    except RequestError as error:
        if not begun:
            raise
        # A journaled stream that ends without its end is one that another node is to go on with.
        if not (journaled and generation.node_failed):
            yield error_event(error)
        return
    except Exception:
        # Status 200 has gone out: the client learns of a defect here or not at all.
        log.exception("request_id=%s unexpected error in a stream", generation.record.request_id)
        yield error_event(internal_error("node"))
        return
    if options.include_usage and not has.usage:
        data += (USAGE_ENTRY if journaled else b"") + encoder.usage(usage_of(generation))
    if not has.done:
        data += (DONE_ENTRY if journaled else b"") + DONE
    yield data


def usage_of(generation: TextGeneration) -> Usage:
    record = generation.record
    prompt, output = record.prompt_tokens, record.answer_tokens
    # Several choices of one prompt find it in the cache each; OpenAI counts a prompt once.
    cached = min(record.cached_tokens, prompt)
    return Usage(prompt, output, prompt + output, PromptTokensDetails(cached))


def _envelope(id_prefix: str, kind: str, options: AnswerOptions) -> Envelope:
    answer = options.answer
    return Envelope(id_prefix + answer.id.hex(), kind, answer.created, options.model, options.fingerprint)
