"""Which formats of reasoning and tool calls a model writes, as its chat template shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pdserve.api.message.call_parser import CallParser
from pdserve.api.message.gemma4_calls import GEMMA4, Gemma4CallParser
from pdserve.api.message.harmony import LAST, MARKERS, HarmonyParser, is_harmony
from pdserve.api.message.json_calls import HERMES, LLAMA_JSON, MISTRAL, NEMOTRON, JsonCallParser
from pdserve.api.message.python_calls import GEMMA, PYTHONIC, PythonCallParser
from pdserve.api.message.reasoning import GEMMA4_THINK, MISTRAL_THINK, THINK, ReasoningMarkers, ReasoningStart
from pdserve.api.message.tool_schemas import ToolSchema
from pdserve.api.message.xml_calls import QWEN_XML, XmlCallParser
from pdserve.config import MessageConfig, ReasoningFormat, ToolFormat
from pdserve.errors import ConfigError

_CALL_MARKERS = {
    ToolFormat.HERMES: HERMES,
    ToolFormat.QWEN_XML: QWEN_XML,
    ToolFormat.LLAMA_JSON: LLAMA_JSON,
    ToolFormat.PYTHONIC: PYTHONIC,
    ToolFormat.MISTRAL: MISTRAL,
    ToolFormat.NEMOTRON: NEMOTRON,
    ToolFormat.GEMMA: GEMMA,
    ToolFormat.GEMMA4: GEMMA4,
}
_REASONING_MARKERS = {
    ReasoningFormat.THINK: THINK,
    ReasoningFormat.MISTRAL: MISTRAL_THINK,
    ReasoningFormat.GEMMA4: GEMMA4_THINK,
}


@dataclass(frozen=True, slots=True)
class MessageFormats:
    """The formats of a model, as its template or the node's settings say."""

    calls: ToolFormat
    reasoning: ReasoningFormat

    @property
    def label(self) -> str:
        """What other processes compare."""
        return f"calls {self.calls.value}, reasoning {self.reasoning.value}"

    @property
    def call_markers(self) -> tuple[str, ...]:
        """The texts that a parser of calls has to see, though a vocabulary may have them as special tokens."""
        if self.harmony:
            return MARKERS
        markers = _CALL_MARKERS.get(self.calls)
        return () if markers is None else markers.all

    @property
    def harmony(self) -> bool:
        """Whether answers are messages with channels, which one parser takes apart."""
        return self.calls is ToolFormat.HARMONY or self.reasoning is ReasoningFormat.HARMONY

    @property
    def last_markers(self) -> tuple[str, ...]:
        """The texts of tokens that end an answer, though the model's configuration may not say so."""
        return LAST if self.harmony else ()

    @property
    def short_call_ids(self) -> bool:
        """Whether the template takes only ids of nine letters and digits."""
        return self.calls is ToolFormat.MISTRAL

    @property
    def reasoning_markers(self) -> ReasoningMarkers | None:
        return _REASONING_MARKERS.get(self.reasoning)

    def call_parser(self, tools: Mapping[str, ToolSchema], *, parallel: bool) -> CallParser | None:
        """Returns a new parser for one message; None if calls are not parsed."""
        match self.calls:
            case ToolFormat.HERMES | ToolFormat.LLAMA_JSON | ToolFormat.NEMOTRON:
                return JsonCallParser(_CALL_MARKERS[self.calls], tools, parallel=parallel)
            case ToolFormat.MISTRAL:
                return JsonCallParser(MISTRAL, tools, parallel=parallel, named=True)
            case ToolFormat.QWEN_XML:
                return XmlCallParser(tools, parallel=parallel)
            case ToolFormat.PYTHONIC | ToolFormat.GEMMA:
                return PythonCallParser(_CALL_MARKERS[self.calls], tools, parallel=parallel)
            case ToolFormat.GEMMA4:
                return Gemma4CallParser(tools, parallel=parallel)
        return None

    def harmony_parser(self, tools: Mapping[str, ToolSchema], prompt: str, *, parallel: bool) -> HarmonyParser:
        """Returns a new parser for one answer to a prompt that is, or ends with, ``prompt``."""
        return HarmonyParser(
            tools if self.calls is ToolFormat.HARMONY else {},
            prompt,
            parallel=parallel,
            separates_reasoning=self.reasoning is ReasoningFormat.HARMONY,
        )

    def reasoning_start(self, prompt: str) -> ReasoningStart:
        """Returns where an answer begins whose prompt is, or ends with, ``prompt``."""
        markers, prompt = self.reasoning_markers, prompt.rstrip()
        if markers is not None and prompt.endswith(markers.opening):
            return ReasoningStart.INSIDE
        return ReasoningStart.BEHIND if markers and prompt.endswith(markers.closing) else ReasoningStart.BEFORE


NO_FORMATS = MessageFormats(ToolFormat.NONE, ReasoningFormat.NONE)


def formats_of(template: str, config: MessageConfig) -> MessageFormats:
    """Returns the formats that the settings name. Where they say ``auto``, the chat template tells.

    Raises ConfigError for two formats that no answer can have together.
    """
    calls, reasoning = config.tool_parser, config.reasoning_parser
    formats = MessageFormats(
        _call_format(template) if calls is ToolFormat.AUTO else calls,
        _reasoning_format(template) if reasoning is ReasoningFormat.AUTO else reasoning,
    )
    if formats.harmony and not (
        formats.calls in (ToolFormat.HARMONY, ToolFormat.NONE)
        and formats.reasoning in (ReasoningFormat.HARMONY, ReasoningFormat.NONE)
    ):
        raise ConfigError(
            "Harmony is a format of complete answers: with 'harmony' as --tool-parser or --reasoning-parser, "
            f"the other one can only be 'harmony' or 'none', and not {formats.label}"
        )
    return formats


def _call_format(template: str) -> ToolFormat:
    if is_harmony(template):
        return ToolFormat.HARMONY
    if GEMMA4.openings[0] in template:
        return ToolFormat.GEMMA4
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL
    if NEMOTRON.openings[0] in template:
        return ToolFormat.NEMOTRON
    if "<function=" in template and "<parameter=" in template:
        return ToolFormat.QWEN_XML
    if "<tool_call>" in template:
        return ToolFormat.HERMES
    if "func_name1" in template or "<|python_start|>" in template:
        return ToolFormat.PYTHONIC
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return ToolFormat.LLAMA_JSON
    if "<start_of_turn>" in template:
        return ToolFormat.GEMMA
    return ToolFormat.HERMES


def _reasoning_format(template: str) -> ReasoningFormat:
    if is_harmony(template):
        return ReasoningFormat.HARMONY
    if GEMMA4_THINK.opening_token in template:
        return ReasoningFormat.GEMMA4
    if "</think>" in template:
        return ReasoningFormat.THINK
    if "[/THINK]" in template or "[THINK]" in template:
        return ReasoningFormat.MISTRAL
    return ReasoningFormat.NONE
