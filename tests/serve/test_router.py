"""Routing pays with a real model: a long conversation on two prefill workers and one decode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.multi_turn import BLOCK_TOKENS, Conversation, Outcome, chat, config, converse
from serving.local_cluster import LocalCluster
from serving.manifest import resolve_weights
from tests.serve.client import Client
from tests.serve.metrics import Scrape

ADMIN_KEY = "a key for the tests alone"
SESSION = "a-session"
TURNS = 4
WARM_SHARE = 0.4  # of the cold TTFT, at most
TERMS = {"wait_ms", "prefill_ms", "regret_ms", "delay_ms", "eviction_ms", "session_ms", "total"}

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A deployment of its own: two prefill workers of one model."""
    resolve_weights("smollm2-135m")
    key_file = tmp_path_factory.mktemp("admin") / "key"
    key_file.write_text(ADMIN_KEY)
    with LocalCluster(cpus=4) as cluster:
        cluster.serve(config(Path(key_file)), timeout_s=300)
        yield cluster.url


@pytest.fixture(scope="module")
def talk(url: str) -> Outcome:
    return converse(url, TURNS, session=SESSION)


def test_cached_tokens_rise_turn_by_turn(talk: Outcome) -> None:
    """Each turn finds the prompt of the one before, to the block."""
    cached = [answer.cached_tokens for answer in talk.warm]
    prompts = [answer.prompt_tokens for answer in talk.warm]
    assert prompts[0] > 1000
    assert cached[0] == 0
    for before, now in zip(prompts, cached[1:], strict=False):
        assert before - BLOCK_TOKENS < now <= before
    assert cached == sorted(set(cached)), "strictly rising"


def test_warm_turns_answer_sooner(talk: Outcome) -> None:
    assert talk.ttft_ratio <= WARM_SHARE, [
        (round(warm.ttft_ms), round(cold.ttft_ms)) for warm, cold in zip(talk.warm, talk.cold, strict=True)
    ]


def test_answers_equal_those_without_any_cache(talk: Outcome) -> None:
    assert [answer.text for answer in talk.warm] == [answer.text for answer in talk.cold]
    assert len({answer.text for answer in talk.warm}) == TURNS


def test_salts_share_nothing(url: str, talk: Outcome) -> None:
    assert [answer.cached_tokens for answer in talk.cold] == [0] * len(talk.cold)
    salted, _ = Conversation(url, salt="mine").ask("Hello?")
    assert salted.cached_tokens == 0
    again, _ = Conversation(url, salt="mine").ask("Hello?")
    assert again.cached_tokens == (salted.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    other, _ = Conversation(url, salt="yours").ask("Hello?")
    assert other.cached_tokens == 0


def test_another_conversation_finds_the_shared_system_prompt(url: str, talk: Outcome) -> None:
    first, _ = Conversation(url).ask("What is this about?")
    assert 900 < first.cached_tokens < talk.warm[0].prompt_tokens


def test_headers_tell_the_truth(url: str, talk: Outcome, workers: dict[str, set[str]]) -> None:
    for answer in talk.warm + talk.cold:
        assert answer.headers["x-kvrelay-prefill"] in workers["prefill"]
        assert answer.headers["x-kvrelay-decode"] in workers["decode"]
        assert int(answer.headers["x-kvrelay-cached-tokens"]) == answer.cached_tokens
    assert len(workers["prefill"]) == 2
    homes = {answer.headers["x-kvrelay-prefill"] for answer in talk.warm}
    assert len(homes) == 1, "the conversation stays where its prefix is"


@pytest.fixture(scope="module")
def workers(url: str) -> dict[str, set[str]]:
    """pool -> its workers, as they name themselves in the metrics."""
    found: dict[str, set[str]] = {}
    for name, pairs in Scrape(Client(url)).samples():
        if name == "kvrelay_engine_steps_total":
            labels = dict(pairs)
            found.setdefault(labels["pool"], set()).add(labels["worker"])
    return found


def test_a_session_is_accepted_and_a_bad_one_refused(url: str, talk: Outcome) -> None:
    """`talk` had one."""
    with pytest.raises(RuntimeError, match=r"400.*x-session-id"):
        chat(url, [{"role": "user", "content": "x"}], session="not a session")


def debug(url: str, key: str | None) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.get(url + "/debug/router", headers=headers, timeout=30)


@pytest.mark.parametrize("key", [None, "a wrong key of some length"], ids=["none", "wrong"])
def test_debug_route_wants_the_key(url: str, key: str | None) -> None:
    assert debug(url, key).status_code == 401


def test_debug_route_explains_every_choice(url: str, talk: Outcome, workers: dict[str, set[str]]) -> None:
    response = debug(url, ADMIN_KEY)
    assert response.status_code == 200
    choices: list[dict[str, Any]] = response.json()["smollm2-135m/main"]
    assert len(choices) >= len(talk.warm + talk.cold)
    for choice in choices:
        assert set(choice["terms"]) == workers["prefill"] | workers["decode"]
        for ident in workers["prefill"]:
            assert set(choice["terms"][ident]) == TERMS
        chosen = choice["terms"][choice["prefill"]]
        assert chosen["total"] == min(choice["terms"][ident]["total"] for ident in workers["prefill"])
    warm = [choice for choice in choices if choice["cached_tokens"] > 1000]
    assert warm
    for choice in warm:
        (other,) = workers["prefill"] - {choice["prefill"]}
        assert choice["terms"][other]["regret_ms"] > choice["terms"][choice["prefill"]]["regret_ms"] >= 0


def test_metrics_tell_of_the_router(url: str, talk: Outcome) -> None:
    scrape = Scrape(Client(url))
    assert scrape.total("kvrelay_router_decision_seconds_count") >= len(talk.warm + talk.cold)
    assert scrape.total("kvrelay_prefix_hit_tokens_total") >= sum(a.cached_tokens for a in talk.warm)
    assert scrape.total("kvrelay_router_index_blocks") > talk.warm[-1].prompt_tokens / BLOCK_TOKENS
    for kind in ("gaps", "malformed", "orphans", "contradictions", "overfull", "silent"):
        assert scrape.total("kvrelay_router_events_total", kind=kind) == 0, kind
