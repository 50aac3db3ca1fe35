"""Tries clients' grammars in a process of its own: ``python -m pdserve.grammars.trial MODEL_DIR``.

A grammar can be made to take all memory, a minute, or more stack than there is, and the compiler cannot be interrupted.
Here it can: the API process ends this process, and starts another one. What compiled here compiles in an engine, too.

The compiler takes some schemas whose texts begin and cannot end, which are found before an answer can come there:

* A closed object with ``patternProperties`` that match only names which ``properties`` lists. Behind a listed property
  it takes a comma, and nothing after that. The patterns are left out here, which changes no text.
* A schema that refers to itself in all that it requires. It is refused.
* A pattern that no property may match, in an object that may have others. A name that begins so goes on for ever. It
  is refused.
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Final

import msgspec
from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from pdserve.errors import GrammarRefused, PdserveError
from pdserve.grammars import referred
from pdserve.grammars.compiling import MAX_MESSAGE_CHARS, compile_grammar, load_vocabulary, thread_with_deep_stack
from pdserve.process import die_with_parent
from pdserve.wire.sampling_params import MAX_GRAMMAR_BYTES, Grammar, GrammarKind, GrammarTrial, TriedGrammar

_VALUES: Final = frozenset({"enum", "const", "default", "examples"})
"""Keywords that have values, and no schemas."""
_NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords that have a schema under each name."""
_SCALARS: Final = frozenset({"string", "number", "integer", "boolean", "null"})
_LARK: Final = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/(?:[^/\\\n]|\\.)+/|(?P<json>%json\s*)')
"""The literals and comments of Lark, in which nothing is a schema, and what begins one."""
_COMPACT: Final = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
_decoder = json.JSONDecoder()


class Endless(GrammarRefused):
    """A schema has texts that cannot end. ``place`` is the part that is at fault, as ``properties.name``."""

    def __init__(self, why: str, place: str) -> None:
        super().__init__(why)
        self.place = place


def with_ends(grammar: Grammar, vocabulary: LLTokenizer) -> Grammar:
    """Returns a grammar with the same texts, whose schemas let every text end. Raises Endless.

    What is no schema is left as it is: the compiler says what is wrong with it.
    """
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                text = _ended(grammar.text, vocabulary)
            case GrammarKind.LARK:
                text = "".join(_ended_parts(grammar.text, vocabulary))
            case GrammarKind.REGEX:
                return grammar
    except (ValueError, RecursionError):
        return grammar
    return grammar if text == grammar.text else msgspec.structs.replace(grammar, text=text)


def _ended_parts(lark: str, vocabulary: LLTokenizer) -> Iterator[str]:
    done = 0
    while (found := _LARK.search(lark, done)) is not None:
        yield lark[done : found.end()]
        done = found.end()
        if found["json"] is not None:
            _, end = _decoder.raw_decode(lark, done)
            yield _ended(lark[done:end], vocabulary)
            done = end
    yield lark[done:]


def _ended(text: str, vocabulary: LLTokenizer) -> str:
    """Returns the text of a schema that lets every text end. Raises Endless, and ValueError if it is no JSON."""
    schema = json.loads(text)
    if not isinstance(schema, dict):
        return text
    _check_references(schema)
    narrowed = _narrowed(schema, "", vocabulary)
    return text if narrowed is schema else json.dumps(narrowed)


def _narrowed(value: Any, place: str, vocabulary: LLTokenizer) -> Any:
    """Returns a schema, or some, without patterns that match listed names alone; the same object if it has none."""
    if isinstance(value, list):
        return _changed(value, [_narrowed(one, f"{place}[{at}]", vocabulary) for at, one in enumerate(value)])
    if not isinstance(value, dict):
        return value
    parts = dict(value)
    for key, part in value.items():
        here = f"{place}.{key}".lstrip(".")
        if key in _NAMED and isinstance(part, dict):
            named = {name: _narrowed(one, f"{here}.{name}", vocabulary) for name, one in part.items()}
            parts[key] = part if all(named[name] is part[name] for name in part) else named
        elif key not in _VALUES:
            parts[key] = _narrowed(part, here, vocabulary)
    patterns, names = value.get("patternProperties"), value.get("properties", {})
    if isinstance(patterns, dict) and patterns and isinstance(names, dict):
        if value.get("additionalProperties", True) is not False:
            _check_shut_out(patterns, place)
        elif names and not _others_match(list(names), patterns, vocabulary):
            del parts["patternProperties"]
    return value if parts.keys() == value.keys() and all(parts[key] is value[key] for key in value) else parts


def _changed(old: list[Any], new: list[Any]) -> list[Any]:
    return old if all(one is other for one, other in zip(new, old, strict=True)) else new


def _check_shut_out(patterns: Mapping[str, Any], place: str) -> None:
    for pattern, part in patterns.items():
        if part is False:
            raise Endless(
                f"no property may match {pattern!r}, so that a name that begins so could not end: "
                "list what there may be, with 'additionalProperties': false",
                f"{place}.patternProperties".lstrip("."),
            )


def _others_match(names: list[str], patterns: Mapping[str, Any], vocabulary: LLTokenizer) -> bool:
    """Returns whether another property may come behind all those that are listed."""
    schema = {
        "type": "object",
        "properties": dict.fromkeys(names, True),
        "required": names,
        "patternProperties": {pattern: True for pattern, part in patterns.items() if part is not False},
        "additionalProperties": False,
        "x-guidance": _COMPACT,
    }
    try:
        matcher = compile_grammar(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), vocabulary).matcher
    except GrammarRefused:
        return True  # the compiler says of the whole schema what is wrong
    listed = "".join(f"{json.dumps(name, ensure_ascii=False)}:0," for name in names)
    tokens = vocabulary.greedy_tokenize(f'{{{listed}"')
    return matcher.validate_tokens(tokens) == len(tokens)


def _check_references(schema: Mapping[str, Any]) -> None:
    """Raises Endless if the schema refers to something that has no end."""
    parts = {reference: referred(reference, schema) for reference in _references(schema)}
    ended: set[str] = set()
    grown = True
    while grown:
        more = {one for one, part in parts.items() if one not in ended and _can_end(part, ended)}
        ended |= more
        grown = bool(more)
    if endless := sorted(parts.keys() - ended):
        place = endless[0].removeprefix("#").strip("/").replace("/", ".")
        raise Endless("it requires itself, so that no text of it ends", place)


def _references(value: Any) -> Iterator[str]:
    """Yields the references of a schema, or of some."""
    if isinstance(value, list):
        for part in value:
            yield from _references(part)
    if not isinstance(value, dict):
        return
    if isinstance(reference := value.get("$ref"), str):
        yield reference
    for key, part in value.items():
        if key in _NAMED and isinstance(part, dict):
            yield from _references(list(part.values()))
        elif key not in _VALUES:
            yield from _references(part)


def _can_end(schema: Any, ended: Set[str]) -> bool:
    """Returns whether a text of the schema can end, if all references but those in ``ended`` lead to none that can.

    Of what says nothing about that, it can.
    """
    if not isinstance(schema, dict):
        return True
    if isinstance(reference := schema.get("$ref"), str) and reference not in ended:
        return False
    for keyword, enough in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        parts = schema.get(keyword)
        if isinstance(parts, list) and parts and not enough(_can_end(part, ended) for part in parts):
            return False
    if "enum" in schema or "const" in schema:
        return True
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else set(filter(lambda kind: isinstance(kind, str), named or ()))
    if not kinds or kinds & _SCALARS:
        return True
    return ("object" in kinds and _object_can_end(schema, ended)) or (
        "array" in kinds and _array_can_end(schema, ended)
    )


def _object_can_end(schema: Mapping[str, Any], ended: Set[str]) -> bool:
    properties, required = schema.get("properties"), schema.get("required")
    if not (isinstance(properties, dict) and isinstance(required, list)):
        return True
    return all(_can_end(properties.get(name), ended) for name in required if isinstance(name, str))


def _array_can_end(schema: Mapping[str, Any], ended: Set[str]) -> bool:
    least, first = schema.get("minItems", 0), schema.get("prefixItems", [])
    if not isinstance(least, int) or not isinstance(first, list):
        return True
    return all(_can_end(item, ended) for item in first[:least]) and (
        least <= len(first) or _can_end(schema.get("items"), ended)
    )


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
