"""Tests that a chat template renders as transformers renders it, and that its sandbox is as tight."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from pdserve.api.requests.chat_template import RESERVED, ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

TEMPLATES = {
    "plain": """{{ bos_token }}{% for message in messages %}
  {% if message['role'] == 'system' %}
[{{ message['content'] }}]
    {%- else %}
<|{{ message.role }}|>
{{ message.content }}{{ eos_token }}
  {% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>
{% endif %}""",
    "stripped": "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}{{ eos_token }}",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=2, sort_keys=true) }}{{ extra | default('<none>') }}",
    "ascii": "{{ messages | tojson(ensure_ascii=true, separators=(',', ':')) }} content",
    "loops": "{% for m in messages %}"
    "{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, self='x') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ ns.self }}{{ dict(a=1) | tojson }}{{ dict.fromkeys(['k']) | tojson }}{{ 'content' in messages[-1] }}",
    "generation": "{% set x = 1 %}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 2 %}"
    "{{ m.content }}{{ x }}{% endgeneration %}{% else %}{{ m.content }}{{ x }}{% endif %}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content }}{% endfor %}",
    "parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ part.text | default(part.type) }}/{% endfor %}{% endif %}{% endfor %}!",
    "silent": "content is never shown",
    "refusing": "{{ raise_exception('no ' ~ messages | length) }}",
    "undefined": "{{ nothing.at_all.content }}",
    "broken": "{% for %}",
    "private": "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}",
    "private at once": "{{ namespace(_x=1)._x }}",
    "insides": "{{ messages.__class__.__mro__ }}{{ ''.__class__ }}{{ dict.__init__.__globals__ }}",
    "changing": "{% set _ = messages.append(1) %}{{ messages | length }}",
    "endless": "{{ range(999999999) | list | length }}",
}

CHATS: list[list[dict[str, Any]]] = [
    [],
    [{"role": "user", "content": " Hello <b>'&\" 漢字 👩‍👩‍👧 \n"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "two, three \n", "tool_calls": None}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "reasoning": "hm", "content": "so"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "thinking": "a", "reasoning_content": "b", "content": ""}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}, {"type": "image"}]}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": None}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "image"}]}],
]

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": ["<é>"]}}}]


def outcome(render: Any) -> str | None:
    """Returns the text, or None where rendering failed."""
    try:
        return str(render())
    except Exception:
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name: str) -> None:
    build: Any = PreTrainedTokenizerFast
    reference = build(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), chat_template=TEMPLATES[name], **SPECIAL)
    own = ChatTemplate(TEMPLATES[name], SPECIAL)
    shown = 0
    for chat, tools, (begins, continues), extra in itertools.product(
        CHATS, ([], TOOLS), ((True, False), (False, False), (False, True), (True, True)), ({}, {"extra": {"k": [1]}})
    ):
        wanted = outcome(
            lambda: reference.apply_chat_template(
                chat,  # noqa: B023  # called at once
                tools=tools or None,  # noqa: B023
                tokenize=False,
                add_generation_prompt=begins,  # noqa: B023
                continue_final_message=continues,  # noqa: B023
                **extra,  # noqa: B023
            )
        )
        found = outcome(
            lambda: own.render(
                chat,  # noqa: B023
                tools=tools,  # noqa: B023
                add_generation_prompt=begins,  # noqa: B023
                continue_final_message=continues,  # noqa: B023
                variables=extra,  # noqa: B023
            )
        )
        assert found == wanted, (chat, tools, begins, continues, extra)
        shown += wanted is not None
    assert shown or name in {
        "refusing",
        "undefined",
        "broken",
        "private",
        "private at once",
        "insides",
        "changing",
        "endless",
    }


def test_messages_stay_as_they_are() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}], "reasoning": "r", "name": None}]
    before = repr(chat)
    template = ChatTemplate(TEMPLATES["parts"], SPECIAL)
    text = template.render(chat, tools=[], add_generation_prompt=False, continue_final_message=True, variables={})
    assert (text, repr(chat)) == ("a", before)


def test_a_request_sets_nothing_that_transformers_would_take_for_itself() -> None:
    assert set(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters) <= RESERVED
