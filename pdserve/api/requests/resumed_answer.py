"""Resumes an answer that another node has begun: reads the journal of what was generated.

The journal follows the client's own body, and the proxy's ticket announces it. The answer then goes on as if this node
had generated all of it. The client of a stream has the text of the journal's tokens: it is made once more, so that it
ends in the same state, and is thrown away. The client of an answer in one piece has nothing yet: the text is part of
the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hmac import compare_digest

from pdserve.api.answers.text_generation import ChoiceText, TextDelta
from pdserve.api.requests.openai_request import GenerationRequest
from pdserve.api.requests.prompts import Prompt
from pdserve.control.journal import Journal, JournaledChoice, JournalError, digest, parse
from pdserve.errors import InvalidRequest, Unauthorized
from pdserve.wire.terms import Resume, Storing


def split_body(data: bytes, resume: Resume) -> tuple[bytes, bytes]:
    """Returns the client's body and the journal behind it. Raises Unauthorized if that is not the ticket's journal."""
    end = len(data) - resume.journal_bytes
    entries = data[max(end, 0) :]
    if end < 0 or not compare_digest(digest(entries), resume.digest):
        raise Unauthorized("the proxy's ticket is for another journal than the request has", code="bad_ticket")
    return data[:end], entries


def split_history(data: bytes, storing: Storing | None) -> tuple[bytes, bytes | None]:
    """Returns the client's body and the items of earlier responses behind it; None if no proxy stores any.

    Raises Unauthorized if there are fewer bytes than the ticket says.
    """
    if storing is None:
        return data, None
    end = len(data) - storing.history_bytes
    if end < 0:
        raise Unauthorized("the proxy's ticket announces more items than the request has", code="bad_ticket")
    return data[:end], data[end:]


def read_journal(entries: bytes, request: GenerationRequest, prompts: Sequence[Prompt], vocab_size: int) -> Journal:
    """Returns what was generated of the answer to ``request``.

    Raises InvalidRequest if ``entries`` cannot be the journal of its answer.
    """
    if not request.stream and not request.has_complete_journal:
        raise _foreign("an answer that is chosen among several has none")
    try:
        journal = parse(entries, len(prompts) * request.choices, vocab_size)
    except JournalError as exc:
        raise _foreign(str(exc)) from exc
    journals_logprobs = not request.stream and request.wanted_logprobs is not None
    for number, choice in journal.choices.items():
        most = prompts[number // request.choices].max_tokens
        if len(choice.token_ids) > most:
            raise _foreign(f"choice {number} has {len(choice.token_ids)} tokens, of at most {most}")
        if len(choice.logprobs) != (len(choice.token_ids) if journals_logprobs else 0):
            raise _foreign(f"choice {number} has log probabilities of {len(choice.logprobs)} tokens")
        if any(len(each.top) > request.most_beside for each in choice.logprobs):
            raise _foreign(f"choice {number} has more log probabilities of a token than were asked for")
    if not request.stream and (
        journal.usage or journal.done or any(choice.over for choice in journal.choices.values())
    ):
        raise _foreign("it has an end, and the answer comes in one piece")
    open_choices = len(prompts) * request.choices - sum(choice.over for choice in journal.choices.values())
    if (journal.usage or journal.done) and open_choices:
        raise _foreign(f"the answer ends with {open_choices} choices that do not")
    if journal.usage and not request.include_usage:
        raise _foreign("the answer has a usage that the request does not ask for")
    return journal


def resume_texts(texts: Mapping[int, ChoiceText], journal: Journal, *, logprobs: bool) -> None:
    """Takes each choice of ``texts`` to where the client's text ends. ``logprobs`` says whether those are reported.

    Raises InvalidRequest if a choice goes on behind a stop string.
    """
    for number, text in texts.items():
        if (journaled := journal.choices.get(number)) is not None:
            _resume(text, journaled.token_ids, logprobs=logprobs)


def resume_before_last_group(texts: Mapping[int, ChoiceText], journal: Journal) -> list[TextDelta]:
    """Takes the one choice of a stream of event groups to the beginning of the last group that the client has any of.

    Returns the choice's text up to there, group by group. Raises InvalidRequest as ``resume_texts`` does, and if the
    choice is over, which no entry of such a stream says.
    """
    if 0 not in texts:
        raise _foreign("choice 0 is over before the stream is")
    journaled, start = journal.choices.get(0, JournaledChoice()), 0
    deltas = []
    for count in journaled.groups[:-1]:
        deltas.append(_resume(texts[0], journaled.token_ids[start : start + count], logprobs=False))
        start += count
    return deltas


def _resume(text: ChoiceText, token_ids: Sequence[int], *, logprobs: bool) -> TextDelta:
    delta = text.resume(token_ids, logprobs=logprobs)
    if len(delta.token_ids) < len(token_ids):
        raise _foreign(f"choice {delta.choice} goes on behind a stop string")
    return delta


def _foreign(why: str) -> InvalidRequest:
    return InvalidRequest(f"the journal is not one of this request: {why}", code="bad_journal")
