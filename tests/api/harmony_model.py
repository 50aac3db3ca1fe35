"""A model's folder whose tokenizer and chat template are Harmony's in short."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from pdserve.api.message.harmony import MARKERS

TEMPLATE = """\
{%- set effort = reasoning_effort if reasoning_effort is defined else 'medium' -%}
{{- '<|start|>system<|message|>Effort: ' + effort + '<|end|>' -}}
{%- set told = messages[0].role in ['system', 'developer'] -%}
{%- if told or tools -%}
{{- '<|start|>developer<|message|>' + (messages[0].content if told else '') -}}
{%- for tool in tools or [] -%}
{{- '[' + tool.function.name + ': ' + tool.function.description -}}
{%- for name, schema in ((tool.function.parameters or {}).properties or {}).items() -%}
{{- ', ' + name + ': ' + schema.description -}}
{%- endfor -%}
{{- ']' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- set caller = namespace(name='') -%}
{%- for message in (messages[1:] if told else messages) -%}
{%- if message.role == 'user' -%}
{{- '<|start|>user<|message|>' + message.content + '<|end|>' -}}
{%- elif message.role == 'assistant' and message.tool_calls -%}
{%- if message.content and message.thinking -%}
{{- raise_exception('a call has content or thinking, not both') -}}
{%- elif message.content or message.thinking -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' -}}
{%- endif -%}
{%- set caller.name = message.tool_calls[0].function.name -%}
{{- '<|start|>assistant to=functions.' + caller.name + '<|channel|>commentary json<|message|>' -}}
{{- message.tool_calls[0].function.arguments | tojson + '<|call|>' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' -}}
{%- elif message.role == 'tool' -%}
{{- '<|start|>functions.' + caller.name + ' to=assistant<|channel|>commentary<|message|>' -}}
{{- message.content | tojson + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start|>assistant' -}}
{%- endif -%}
"""
"""It shows of a message what gpt-oss's template shows, and fails and drops where that does."""


def save_harmony_model(source: Path, folder: Path) -> Path:
    """Copies the tokenizer in ``source`` to ``folder`` with Harmony's tokens and template. Returns the folder.

    Special tokens of the model that no test needs get their names, so that no id is beyond the model's vocabulary.
    """
    shutil.copytree(source, folder)
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    unused = [token for token in state["added_tokens"] if token["special"]][-len(MARKERS) :]
    for token, text in zip(unused, MARKERS, strict=True):
        del state["model"]["vocab"][token["content"]]
        state["model"]["vocab"][text] = token["id"]
        token["content"] = text
    path.write_text(json.dumps(state))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
