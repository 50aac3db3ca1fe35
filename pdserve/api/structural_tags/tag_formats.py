"""The formats of which a structural tag is put together, as requests write them.

They are those of XGrammar that are about text. Its formats about tokens, grammars within formats, other styles than
JSON and regions of so many tokens have no form here, so that a request with one of these is refused by its place.
XGrammar's own models write every field. One that pdserve does not follow is taken with the value that asks for nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

MAX_PARTS = 512
"""The most formats of one list."""
MAX_TRIGGERS = 128
"""The most triggers of one list. Each is looked for in all others."""
MAX_TRIGGER_CHARS = 128

NonEmpty: TypeAlias = Annotated[str, Meta(min_length=1, max_length=4_096)]
MaybeEmpty: TypeAlias = Annotated[str, Meta(max_length=4_096)]
Texts: TypeAlias = Annotated[list[NonEmpty], Meta(max_length=MAX_PARTS)]
SomeTexts: TypeAlias = Annotated[list[NonEmpty], Meta(min_length=1, max_length=MAX_PARTS)]
Triggers: TypeAlias = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=MAX_TRIGGER_CHARS)]],
    Meta(min_length=1, max_length=MAX_TRIGGERS),
]
NoTexts: TypeAlias = Annotated[list[str], Meta(max_length=0)]
Times: TypeAlias = Annotated[int, Meta(ge=0, le=1_000)]


class ConstString(msgspec.Struct, tag_field="type", tag="const_string", forbid_unknown_fields=True):
    value: MaybeEmpty


class JsonSchemaPart(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    json_schema: dict[str, Any] | bool
    style: Literal["json"] = "json"
    any_order: bool = False
    max_whitespace_cnt: None = None
    excludes: NoTexts = []

    def __post_init__(self) -> None:
        if self.any_order:
            raise ValueError("'any_order' is not supported by pdserve")


class RegexPart(msgspec.Struct, tag_field="type", tag="regex", forbid_unknown_fields=True):
    pattern: Annotated[str, Meta(min_length=1)]


class AnyText(msgspec.Struct, tag_field="type", tag="any_text", forbid_unknown_fields=True):
    """Any text up to what stands behind it, or to the end of the answer."""

    excludes: Texts = []
    """It has none of these in it."""
    max_tokens: None = None
    max_chars: None = None


class InOrder(msgspec.Struct, tag_field="type", tag="sequence", forbid_unknown_fields=True):
    elements: Annotated[list[Format], Meta(max_length=MAX_PARTS)]


class Either(msgspec.Struct, tag_field="type", tag="or", forbid_unknown_fields=True):
    elements: Annotated[list[Format], Meta(min_length=1, max_length=MAX_PARTS)]


class Maybe(msgspec.Struct, tag_field="type", tag="optional", forbid_unknown_fields=True):
    content: Format


class OnceOrMore(msgspec.Struct, tag_field="type", tag="plus", forbid_unknown_fields=True):
    content: Format


class AnyTimes(msgspec.Struct, tag_field="type", tag="star", forbid_unknown_fields=True):
    content: Format


class Repeated(msgspec.Struct, tag_field="type", tag="repeat", forbid_unknown_fields=True):
    content: Format
    min: Times
    max: Annotated[int, Meta(ge=-1, le=1_000)]
    """-1 is any number."""


class Tag(msgspec.Struct, tag_field="type", tag="tag", forbid_unknown_fields=True):
    """Something with a beginning and one of some ends."""

    begin: MaybeEmpty
    content: Format
    end: MaybeEmpty | SomeTexts


class TriggeredTags(msgspec.Struct, tag_field="type", tag="triggered_tags", forbid_unknown_fields=True):
    """Free text, in which a tag has to follow wherever a trigger comes, with which the tag begins."""

    triggers: Triggers
    tags: Annotated[list[Tag], Meta(min_length=1, max_length=MAX_PARTS)]
    at_least_one: bool = False
    """Whether it begins with a tag."""
    stop_after_first: bool = False
    excludes: Texts = []


class SeparatedTags(msgspec.Struct, tag_field="type", tag="tags_with_separator", forbid_unknown_fields=True):
    """Tags with a text between each two."""

    tags: Annotated[list[Tag], Meta(min_length=1, max_length=MAX_PARTS)]
    separator: MaybeEmpty
    at_least_one: bool = False
    stop_after_first: bool = False


Format: TypeAlias = (
    ConstString
    | JsonSchemaPart
    | RegexPart
    | AnyText
    | InOrder
    | Either
    | Maybe
    | OnceOrMore
    | AnyTimes
    | Repeated
    | Tag
    | TriggeredTags
    | SeparatedTags
)


class TaggedStructure(msgspec.Struct, forbid_unknown_fields=True):
    """A tag as older clients write it, whose content is JSON."""

    begin: NonEmpty
    end: MaybeEmpty
    schema: dict[str, Any] | bool | None = None
    """Any JSON if missing."""
    type: Literal["tag"] | None = None


Structures: TypeAlias = Annotated[list[TaggedStructure], Meta(min_length=1, max_length=MAX_PARTS)]


class StructuralTag(msgspec.Struct, forbid_unknown_fields=True):
    """A whole one: a format, or ``structures`` and their ``triggers`` as older clients have them."""

    type: Literal["structural_tag"]
    format: Format | None = None
    structures: Structures | None = None
    triggers: Triggers | None = None
