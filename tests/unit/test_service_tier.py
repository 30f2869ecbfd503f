"""`service_tier` names a class of the model's targets: what it changes, and what it may not be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serving.config import SloClass, load_config
from serving.errors import ConfigError
from tests.scripted import ScriptedGenerator, make_client
from tests.tiny_tokenizer import tiny_model

CLASSES = {"chat": SloClass(ttft_ms=300, priority=2), "batch": SloClass(ttft_ms=60_000, priority=-3)}


@pytest.mark.parametrize(
    ("tier", "slo_class", "priority"),
    [(None, None, 0), ("auto", None, 0), ("default", None, 0), ("chat", "chat", 2), ("batch", "batch", -3)],
)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
async def test_a_tier_is_a_class(
    endpoint: str, tier: str | None, slo_class: str | None, priority: int
) -> None:
    generator = ScriptedGenerator()
    client = make_client(generator, models=[replace(tiny_model(), classes=CLASSES)])
    reply = await getattr(client, endpoint)(service_tier=tier)
    assert reply.status == 200
    (request,) = generator.requests
    assert (request.slo_class, request.priority) == (slo_class, priority)


async def test_a_tier_that_is_no_class_is_refused_with_what_is_allowed() -> None:
    client = make_client(ScriptedGenerator(), models=[replace(tiny_model(), classes=CLASSES)])
    reply = await client.complete(service_tier="gold")
    assert reply.status == 400
    error = reply.json["error"]
    assert error["param"] == "service_tier"
    assert error["message"] == "service_tier = 'gold'; allowed: auto, default, batch, chat"


async def test_without_classes_any_tier_is_accepted() -> None:
    """Clients of OpenAI send theirs."""
    generator = ScriptedGenerator()
    assert (await make_client(generator).complete(service_tier="flex")).status == 200
    assert generator.requests[0].slo_class is None


def test_classes_of_the_configuration() -> None:
    def classes(given: Any) -> Any:
        model = {"name": "m", "variants": [{"weights": "w"}], "slo": {"classes": given}}
        return load_config({"models": [model]}).models[0].slo.classes

    assert classes({"batch": {"ttft_ms": 60000, "priority": -3}}) == {"batch": CLASSES["batch"]}
    with pytest.raises(ConfigError, match="priority"):
        classes({"batch": {"priority": 100}})
