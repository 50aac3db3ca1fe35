"""Tries clients' grammars in a process of its own: ``python -m pdserve.grammars.trial MODEL_DIR``.

A grammar can be made to take all memory, a minute, or more stack than there is, and the compiler cannot be interrupted.
Here it can: the API process ends this process, and starts another one. What compiled here compiles in an engine, too.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from pdserve.errors import GrammarRefused, PdserveError
from pdserve.grammars.compiling import MAX_MESSAGE_CHARS, compile_grammar, load_vocabulary, thread_with_deep_stack
from pdserve.grammars.schema_ends import Endless, with_ends
from pdserve.process import die_with_parent
from pdserve.wire.sampling_params import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, GrammarTrial, TriedGrammar

MAX_MEMORY_BYTES = 4 * 2**30
"""The address space of this process. A grammar that needs more ends it."""
NICENESS = 5
MAX_TRIES = 200
"""At most so many parts of a schema are compiled alone, to find the one that is at fault."""
SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""The keywords whose value has a schema under each name."""
SUBSCHEMA = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
SUBSCHEMA_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")


def main() -> int:
    """Answers trials, each a line of JSON, until standard input ends."""
    die_with_parent()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    try:
        # Its end-of-sequence token makes no difference to what compiles.
        vocabulary = load_vocabulary(Path(sys.argv[1]), [0], *map(Path, sys.argv[2:3]))
    except PdserveError as exc:
        print(exc, file=sys.stderr)
        return 1
    thread_with_deep_stack(lambda: _serve(vocabulary), "trials").join()
    return 0


def _serve(vocabulary: LLTokenizer) -> None:
    decoder = msgspec.json.Decoder(GrammarTrial)
    for line in sys.stdin.buffer:
        tried = try_grammar(decoder.decode(line), vocabulary)
        sys.stdout.buffer.write(msgspec.json.encode(tried) + b"\n")
        sys.stdout.buffer.flush()


def try_grammar(trial: GrammarTrial, vocabulary: LLTokenizer) -> TriedGrammar:
    """Returns whether a grammar compiles, and if not, why and where."""
    grammar = trial.grammar
    if trial.ebnf:
        try:
            grammar = _as_lark(grammar)
        except GrammarRefused as exc:
            return TriedGrammar(trial.grammar, str(exc))
    try:
        grammar = with_ends(grammar, vocabulary)
    except Endless as exc:
        return TriedGrammar(trial.grammar, str(exc), exc.place)
    refusal = _refusal(grammar, vocabulary)
    if refusal and grammar.kind is GrammarKind.JSON_SCHEMA:
        return TriedGrammar(grammar, *_place(grammar.text, refusal, vocabulary))
    return TriedGrammar(grammar, refusal)


def _as_lark(grammar: Grammar) -> Grammar:
    try:
        text = any_to_lark(grammar.text)
    except Exception as exc:
        # The converter is a parser by hand: what it raises on texts that it does not expect is not a closed set.
        raise GrammarRefused(str(exc)[:MAX_MESSAGE_CHARS] or type(exc).__name__) from exc
    if len(text) > MAX_GRAMMAR_BYTES:
        raise GrammarRefused(f"the grammar has {len(text)} characters in Lark; at most {MAX_GRAMMAR_BYTES} are allowed")
    return msgspec.structs.replace(grammar, text=text)


def _refusal(grammar: Grammar, vocabulary: LLTokenizer) -> str:
    try:
        compile_grammar(grammar, vocabulary, quick=False)
    except GrammarRefused as exc:
        return str(exc) or "it does not compile"
    return ""


def _place(text: str, refusal: str, vocabulary: LLTokenizer) -> tuple[str, str]:
    """Returns why a schema is refused, and its smallest part that is refused by itself."""
    schema = msgspec.json.decode(text)
    shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    place, tries = "", 0
    found = True
    while found:
        found = False
        for name, part in _parts(schema):
            tries += 1
            if tries > MAX_TRIES:
                return refusal, place
            own = part | {key: value for key, value in shared.items() if key not in part}
            why = _refusal(Grammar(GrammarKind.JSON_SCHEMA, msgspec.json.encode(own).decode()), vocabulary)
            if why:
                place, refusal, schema, found = f"{place}.{name}".lstrip("."), why, part, True
                break
    return refusal, place


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the schemas that a schema is made of, with their names."""
    for key in SUBSCHEMAS:
        if isinstance(named := schema.get(key), dict):
            yield from ((f"{key}.{name}", part) for name, part in named.items() if isinstance(part, dict))
    for key in SUBSCHEMA:
        if isinstance(part := schema.get(key), dict):
            yield key, part
    for key in SUBSCHEMA_LISTS:
        if isinstance(listed := schema.get(key), list):
            yield from ((f"{key}[{i}]", part) for i, part in enumerate(listed) if isinstance(part, dict))


if __name__ == "__main__":
    sys.exit(main())
