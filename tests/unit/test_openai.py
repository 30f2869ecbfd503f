"""Bodies that are accepted: unknown fields, neutral values of refused ones, tools not to be called."""

from __future__ import annotations

from serving.openai import sampling_params
from tests.tiny_tokenizer import tiny_model
from tests.unit.openai_bodies import chat, completion


def test_unknown_fields_accepted() -> None:
    chat(
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        vendor={"deep": [1, {}]},
        verbosity="low",
    )
    completion(user="u", metadata={"a": "b"}, vendor=[1])


def test_neutral_values_of_refused_fields_are_accepted() -> None:
    chat(
        n=1,
        best_of=1,
        response_format={"type": "text"},
        tools=[],
        tool_choice="auto",
        functions=[],
        modalities=["text"],
        suffix="",
        guided_json=None,
    )


def test_null_means_the_default() -> None:
    fields = [
        "max_tokens",
        "temperature",
        "top_p",
        "stop",
        "seed",
        "logprobs",
        "stream",
        "stream_options",
        "n",
    ]
    body = chat(**dict.fromkeys(fields))
    assert sampling_params(body, tiny_model(), 10).temperature == 1.0


def test_tool_many() -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": {}}} for i in range(20)]
    chat(tools=tools, tool_choice="none")
