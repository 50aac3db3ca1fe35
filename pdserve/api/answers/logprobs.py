"""Sends tokens' log probabilities with the text that those tokens made, in OpenAI's two forms.

``ShownTokens`` knows which tokens the text that a client was shown is made of. ``ShownLogprobs`` gives them the form
of a chat or a text completion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from pdserve.api.answers.openai_response import ChatLogprobs, ChatTokenLogprob, TextLogprobs, TopLogprob
from pdserve.wire.sampling_params import TokenLogprobs


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token of an answer."""

    token_id: int
    logprobs: TokenLogprobs | None
    """None for the first token of a prompt, which follows nothing."""
    offset: int
    """How many characters of the answer are before the token's own, or of the prompt."""


class ShownTokens:
    """Keeps the tokens of one output, whose text is given token by token and shown later, from its beginning.

    A token without text of its own (part of a character, or a special token that is not shown) belongs to the next one
    that has some.
    """

    def __init__(self) -> None:
        self._length = 0
        self.taken_chars = 0
        """How many characters the tokens have that were taken, and those before them."""
        self._textless: list[ShownToken] = []
        self._waiting: deque[tuple[int, ShownToken]] = deque()

    def add(self, token_id: int, logprobs: TokenLogprobs, text: str) -> None:
        """Adds a token. ``text`` is what became certain with it."""
        self._textless.append(ShownToken(token_id, logprobs, self._length))
        if text:
            self._length += len(text)
            self._waiting.extend((self._length, token) for token in self._textless)
            self._textless = []

    def skip(self, chars: int) -> None:
        """Begins after the tokens of the first ``chars`` characters, which another node has shown."""
        self._length = self.taken_chars = chars

    def take(self, shown: int) -> list[ShownToken]:
        """Returns each token once, as soon as its text lies within the first ``shown`` characters."""
        taken = []
        while self._waiting and self._waiting[0][0] <= shown:
            self.taken_chars, token = self._waiting.popleft()
            taken.append(token)
        return taken

    def take_last(self, shown: int, *, cut: bool) -> list[ShownToken]:
        """Returns all tokens that are left. Of an answer that was cut, they begin within what was shown."""
        left = [token for _, token in self._waiting] + self._textless
        self._waiting.clear()
        self._textless = []
        return [token for token in left if not cut or token.offset < shown]


BytesOfToken: TypeAlias = Callable[[int], bytes]

_NOTHING_KNOWN = TokenLogprobs(0.0, 1, ())
LEAST = -9999.0
"""What OpenAI says of a token that cannot come at all, because JSON has no infinity."""


@dataclass(frozen=True, slots=True)
class ShownLogprobs:
    """The tokens of one choice or chunk."""

    tokens: Sequence[ShownToken]
    token_bytes: BytesOfToken
    offset: int = 0
    """How many characters the client sees before the answer."""
    as_ids: bool = False
    """Whether tokens are named by their ids."""
    beside_named: bool = False
    """Whether the client has named the tokens beside each chosen one, which a chat then lists among them."""

    def for_chat(self) -> ChatLogprobs:
        return ChatLogprobs([self._chat_token(token) for token in self.tokens])

    def for_text(self) -> TextLogprobs:
        return TextLogprobs(
            [self._name(token.token_id) for token in self.tokens],
            [None if token.logprobs is None else finite(token.logprobs.chosen) for token in self.tokens],
            [self._by_name(token) for token in self.tokens],
            [self.offset + token.offset for token in self.tokens],
        )

    def _chat_token(self, token: ShownToken) -> ChatTokenLogprob:
        logprobs = token.logprobs or _NOTHING_KNOWN
        own = self._entry(token.token_id, logprobs.chosen)
        top = [self._entry(token_id, logprob) for token_id, logprob in logprobs.top]
        if self.beside_named and all(token_id != token.token_id for token_id, _ in logprobs.top):
            top.insert(0, own)
        return ChatTokenLogprob(own.token, own.logprob, own.bytes, top)

    def _entry(self, token_id: int, logprob: float) -> TopLogprob:
        data = self.token_bytes(token_id)
        return TopLogprob(_id_name(token_id) if self.as_ids else _escaped(data), finite(logprob), list(data))

    def _by_name(self, token: ShownToken) -> dict[str, float] | None:
        """Returns the chosen token, and after it the likeliest ones. Where two have one name, the likelier has it."""
        if token.logprobs is None:
            return None
        named = {self._name(token.token_id): finite(token.logprobs.chosen)}
        for token_id, logprob in token.logprobs.top:
            name = self._name(token_id)
            named[name] = max(finite(logprob), named.get(name, LEAST))
        return named

    def _name(self, token_id: int) -> str:
        if self.as_ids:
            return _id_name(token_id)
        data = self.token_bytes(token_id)
        text = _escaped(data)
        return text if _is_text(data) else f"bytes:{text}"


class CompleteLogprobs:
    """Encodes the log probabilities of one choice of a complete answer as its tokens come.

    Encoding all of them at the end would hold up other requests' tokens.
    """

    def __init__(self) -> None:
        self._fields: dict[str, list[bytes]] = {}

    def add(self, part: ChatLogprobs | TextLogprobs) -> None:
        """Adds the next part. Its lists continue those before; what is no list is the same in every part."""
        for name in part.__struct_fields__:
            value = getattr(part, name)
            pieces = self._fields.setdefault(name, [])
            if not isinstance(value, list):
                self._fields[name] = [_encoder.encode(value)]
            elif value:
                pieces.append(_encoder.encode(value)[1:-1])

    def copy(self) -> CompleteLogprobs:
        """Returns what was added so far, which goes on by itself."""
        copy = CompleteLogprobs()
        copy._fields = {name: list(pieces) for name, pieces in self._fields.items()}
        return copy

    def extend(self, later: CompleteLogprobs) -> None:
        """Adds all parts of ``later``."""
        for name, pieces in later._fields.items():
            self._fields.setdefault(name, []).extend(pieces)

    def encoded(self, empty: ChatLogprobs | TextLogprobs) -> msgspec.Raw:
        """Returns all of it as JSON, or ``empty`` as JSON if there was no token."""
        lists = {name for name in empty.__struct_fields__ if isinstance(getattr(empty, name), list)}
        self.add(empty)
        fields = [
            b'"%b":' % name.encode() + (b"[%b]" if name in lists else b"%b") % b",".join(pieces)
            for name, pieces in self._fields.items()
        ]
        return msgspec.Raw(b"{%b}" % b",".join(fields))


_encoder = msgspec.json.Encoder()


def without_infinity(logprobs: TokenLogprobs) -> TokenLogprobs:
    """Returns the log probabilities as they can be written as JSON. What the client gets of them is the same."""
    top = tuple((token_id, finite(logprob)) for token_id, logprob in logprobs.top)
    return TokenLogprobs(finite(logprobs.chosen), logprobs.rank, top)


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def _escaped(data: bytes) -> str:
    r"""Returns the text, with ``\xe2`` and the like for bytes that are only part of a character."""
    return data.decode(errors="backslashreplace")


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def finite(logprob: float) -> float:
    """Returns the log probability as JSON can have it."""
    return max(logprob, LEAST)
