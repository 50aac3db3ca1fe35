"""Compiles a grammar for a model's vocabulary, in bounded memory, into what says with which tokens an answer may go on.

The bounds are counts, not times, so that every process decides alike about one grammar: one that compiles in the API
process compiles in the engines as well. They also bound the work of a mask: one of a regular expression takes 25 ms at
most, of a schema with hundreds of optional properties 20 ms, and of an ambiguous grammar half a second. Usual ones take
20 to 100 µs.

No step waits for the long ones. An engine compiles each grammar a second time with closer bounds (``quick``). That says
the same, or gives up soon, and is all that a step asks. What it gives up is worked out beside the steps
(``engine.sampling.grammar_opener``).

The compiler is recursive, in code that cannot report that its stack is full. It therefore runs in threads that
``thread_with_deep_stack`` makes, and the API process tries a client's grammar in another process first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pdserve.errors import GrammarRefused, ModelError
from pdserve.models.checkpoint.cached_tokenizer import read_tokenizer
from pdserve.wire.sampling_params import JSON_WHITESPACE, STRUCTURE, Grammar, GrammarKind

MAX_SYMBOLS: Final = 8_000
"""The symbols of a grammar's rules. A schema of some 2,000 required properties has so many. The time of a mask
grows with the square of the optional properties that may come next."""
STEP_FUEL: Final = 100_000
"""The work of one mask in the lexer. A regular expression made for it takes 7 ms to use this up."""
MAX_ITEMS: Final = 40_000
"""The work of one mask in the parser. A thousand optional parts in a row, each with choices, took half a second without
this bound, and take a tenth of one with it."""
MAX_ITEMS_AT_ONCE: Final = 4_000
"""The places of a grammar at which an answer may be at once. An object needs four for each optional property, and can
have a thousand of them within ``MAX_SYMBOLS``. Their masks take 20 ms."""
QUICK_FUEL: Final = 20_000
QUICK_ITEMS: Final = 4_000
QUICK_ITEMS_AT_ONCE: Final = 1_000
"""The bounds of what a step may ask. A schema with 200 optional properties in one object keeps them."""
MAX_LEXER_STATES: Final = 20_000
"""Each state takes one to two kB. A text of up to n characters, counted by ``maxLength``, needs n of them."""
STACK_BYTES: Final = 256 * 2**20
"""The stack of threads that compile. Memory is taken only for what is used of it."""
MAX_MESSAGE_CHARS: Final = 1_000


def load_vocabulary(model_dir: Path, eos_token_ids: Sequence[int], cache_dir: Path | None = None) -> LLTokenizer:
    """Returns the vocabulary of a Hugging Face folder or of a GGUF file, whose tokenizer may be in ``cache_dir``.

    An answer with a grammar ends with one of ``eos_token_ids``, where the grammar lets it end. To read a vocabulary of
    49,152 tokens takes a third of a second, in which no other thread of the process runs, and some 50 MiB. So an engine
    reads it while it loads its weights (that of a GGUF file with the first grammar), and once. Raises ModelError.
    """
    if not eos_token_ids:
        raise ModelError("the model has no end-of-sequence token, so that no answer with a grammar could end")
    try:
        tokenizer, ends = _tokenizer_json(model_dir, cache_dir), list(eos_token_ids)
        # An empty list of slices would save a fifth of the time, and make masks slower.
        vocabulary = LLTokenizer(tokenizer, eos_token=ends)
        added = _added_decoder.decode(tokenizer).added_tokens
    except (OSError, ValueError) as exc:
        raise ModelError(f"cannot read the tokenizer in {model_dir} for grammars: {exc}") from exc
    texts = _texts({token.content.encode() for token in added if not token.special}, vocabulary) - set(ends)
    return _with_texts(vocabulary, texts, ends) if texts else vocabulary


class _AddedToken(msgspec.Struct):
    content: str
    special: bool = False


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


_added_decoder = msgspec.json.Decoder(_AddedTokens)


class _SpelledOut:
    """The tokens of a vocabulary, in the form in which llguidance takes them one by one."""

    def __init__(self, vocabulary: LLTokenizer, texts: Collection[int]) -> None:
        """``texts`` are the tokens that are texts, though the vocabulary has them as special tokens."""
        ids = range(vocabulary.vocab_size)
        self.eos_token_id = vocabulary.eos_token
        self.bos_token_id = None
        self.tokens = [vocabulary.decode_bytes([token_id]) for token_id in ids]
        self.special_token_ids = [one for one in ids if vocabulary.is_special_token(one) and one not in texts]
        self._vocabulary = vocabulary

    def __call__(self, text: bytes) -> list[int]:
        return self._vocabulary.tokenize_bytes(text)


def _texts(contents: Collection[bytes], vocabulary: LLTokenizer) -> set[int]:
    """Returns the tokens with these contents that the vocabulary has as special ones. It has its own view of ids."""
    if not contents:
        return set()
    special = filter(vocabulary.is_special_token, range(vocabulary.vocab_size))
    return {token_id for token_id in special if vocabulary.decode_bytes([token_id]) in contents}


def _with_texts(vocabulary: LLTokenizer, texts: Collection[int], ends: Sequence[int]) -> LLTokenizer:
    """Returns the vocabulary with ``texts`` as tokens that a grammar's letters match.

    llguidance takes each added token with angle brackets around it for a special one. Qwen's ``<tool_call>`` and
    ``<think>`` are texts, as their files say: what a grammar spells out has to match the token that the model writes.
    """
    return LLTokenizer(TokenizerWrapper(_SpelledOut(vocabulary, texts)), eos_token=list(ends))


def _tokenizer_json(model_dir: Path, cache_dir: Path | None) -> str:
    whole = model_dir / "tokenizer.json"
    return whole.read_text(encoding="utf-8") if whole.is_file() else read_tokenizer(model_dir, cache_dir).backend


@dataclass(slots=True)
class CompiledGrammar:
    """A grammar for one vocabulary. The matchers are in their first states, to be copied for each answer."""

    matcher: LLMatcher
    first_bits: bytes
    """The mask of an answer's first token."""
    num_tokens: int
    """The size of the vocabulary. The matcher cannot be asked about other tokens, which a model may have."""
    quick: LLMatcher | None = None
    """The same grammar with bounds that a step can wait for; None once it was found to be beyond them."""


def compile_grammar(grammar: Grammar, vocabulary: LLTokenizer, *, quick: bool = True) -> CompiledGrammar:
    """Returns a compiled grammar. Raises GrammarRefused, which says why.

    Without ``quick`` nothing but that is found out.
    """
    source = _source(grammar)
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=_limits(STEP_FUEL, MAX_ITEMS, MAX_ITEMS_AT_ONCE))
    if matcher.is_error():
        raise GrammarRefused(matcher.get_error().strip()[:MAX_MESSAGE_CHARS])
    first = matcher.deep_copy()
    first_bits = first.compute_bitmask()
    if first.is_error():
        raise GrammarRefused(trouble(first))
    compiled = CompiledGrammar(matcher, first_bits, vocabulary.vocab_size)
    if quick:
        compiled.quick = _quick(source, vocabulary)
    return compiled


def _quick(source: str, vocabulary: LLTokenizer) -> LLMatcher | None:
    limits = _limits(QUICK_FUEL, QUICK_ITEMS, QUICK_ITEMS_AT_ONCE)
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
    first = matcher.deep_copy()
    first.compute_bitmask()
    return None if first.is_error() else matcher


def _limits(fuel: int, items: int, items_at_once: int) -> LLParserLimits:
    return LLParserLimits(
        max_grammar_size=MAX_SYMBOLS,
        step_lexer_fuel=fuel,
        step_max_items=items,
        max_items_in_row=items_at_once,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )


def trouble(matcher: LLMatcher) -> str:
    """Returns why a matcher that has an error cannot go on."""
    error = matcher.get_error().partition("\n")[0]
    return "no text fits it" if error.startswith("NoExtension") else f"it is too much work: {error}"


def _source(grammar: Grammar) -> str:
    own = _own_source(grammar)
    if not grammar.before:
        return own
    part = {"lark_grammar": own} if grammar.kind is GrammarKind.LARK else msgspec.json.decode(own)["grammars"][0]
    whole = [{"lark_grammar": grammar.before}, {**part, "name": STRUCTURE}]
    return msgspec.json.encode({"grammars": whole}).decode()


def _own_source(grammar: Grammar) -> str:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            try:
                return LLMatcher.grammar_from_json_schema(
                    grammar.text, defaults={"whitespace_pattern": JSON_WHITESPACE}
                )
            except ValueError as exc:
                raise GrammarRefused(str(exc)[:MAX_MESSAGE_CHARS]) from exc
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)


def thread_with_deep_stack(target: Callable[[], None], name: str) -> threading.Thread:
    """Starts and returns a thread for compiling, for which the process does not wait when it ends."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    before = threading.stack_size(STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    return thread
