"""Chat templates: the same prompt as transformers makes; what a template raises becomes a 400."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serving.chat import ChatTemplate
from serving.errors import InvalidRequest, StartError
from serving.served_model import read_chat_template
from tests.tiny_tokenizer import TEMPLATE

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi <b>&</b>"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "日本 🎉\n"},
    ],
    [{"role": "user", "content": "a"}, {"role": "user", "content": ""}],
]

# Every feature of the environment that templates in the wild use.
FEATURES = """
{%- set ns = namespace(count=0) -%}
{% for m in messages %}
    {% if m.role == 'assistant' %}
        {% continue %}
    {% endif %}
    {% set ns.count = ns.count + 1 %}
{{ m | tojson }}|{{ dict(a=1) | tojson(indent=2) }}|{{ '<é>' | tojson }}
    {% generation %}{{ m['content'] | trim }}{% endgeneration %}
    {% if ns.count > 2 %}{% break %}{% endif %}
{% endfor %}
{{ bos_token }}{{ strftime_now('%Y') }}{{ tools is none }}
{{ add_generation_prompt }}{{ messages[0].content[:2] }}
"""


def rendered_by_transformers(template: str, messages: list[dict[str, Any]]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered = render_jinja_template(
        [messages], chat_template=template, add_generation_prompt=True, bos_token="<s>", documents=None
    )
    return str(rendered[0][0])


@pytest.mark.parametrize(
    "messages", CONVERSATIONS, ids=[f"conversation {i}" for i in range(len(CONVERSATIONS))]
)
@pytest.mark.parametrize(
    "template", [FEATURES, TEMPLATE.split("{% if m.role")[0] + "{{ m.content }}{% endfor %}"]
)
def test_equals_transformers(template: str, messages: list[dict[str, Any]]) -> None:
    ours = ChatTemplate(template, {"bos_token": "<s>"}).render(messages)
    assert ours == rendered_by_transformers(template, messages)


def test_the_default_model_equals_transformers(smollm2: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2)
    ours = read_chat_template(smollm2)
    assert ours is not None
    for messages in CONVERSATIONS:
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.render(messages) == expected


def refused(template: str, messages: list[dict[str, Any]]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(template, {}).render(messages)
    assert caught.value.param == "messages"
    assert len(caught.value.message) < 300
    return caught.value


def test_roles_not_alternating() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert "roles must alternate" in refused(TEMPLATE, messages).message


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('x' * 10000) }}",
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ nothing() }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_whatever_a_template_raises_is_a_400(template: str) -> None:
    refused(template, [{"role": "user", "content": "SECRET" * 100}])


def test_the_clients_text_is_not_repeated() -> None:
    error = refused("{{ {}[messages[0].content].x }}", [{"role": "user", "content": "SECRET"}])
    assert "SECRET" not in error.message


def test_unusual_roles() -> None:
    """A developer message is the system's, unless the template knows developers."""
    developer = [{"role": "developer", "content": "Be terse."}, {"role": "user", "content": "Hi"}]
    system = [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "Hi"}]
    template = ChatTemplate(TEMPLATE, {})
    assert template.render(developer) == template.render(system)
    knowing = ChatTemplate("{% if messages[0].role == 'developer' %}D{% endif %}", {})
    assert knowing.render(developer) == "D"


def test_template_variables_reach_the_template_but_not_the_messages() -> None:
    template = ChatTemplate("{{ thinking }}{{ messages | length }}{{ add_generation_prompt }}", {})
    variables = {"thinking": "on", "messages": [], "add_generation_prompt": False}
    assert template.render(CONVERSATIONS[0], variables) == "on1True"


def test_a_broken_template_is_a_start_error() -> None:
    with pytest.raises(StartError, match="does not compile"):
        ChatTemplate("{% for %}", {})


@pytest.fixture(scope="session")
def smollm2() -> Path:
    from serving.manifest import resolve_weights

    return resolve_weights("smollm2-135m")
