"""Policies as tables: candidates in, choice out; the numbers are worked out in the comments."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvrouter.cost import Candidate, Demand, cheapest_prefix, pick, with_room
from kvrouter.perf_model import WorkerModels
from kvrouter.policies.policy import Policy
from kvrouter.policies.registry import POLICY_NAMES, make_policy
from serving.errors import ConfigError

PROMPT = 1000  # tokens, 10 blocks of 100
MS_PER_TOKEN = 0.1


def worker(
    ident: str,
    *,
    cached: int = 0,
    queued: int = 0,
    in_flight: int = 0,
    kv_blocks: int = 0,
    delays: int = 0,
    itl_ms: float = 10.0,
    turnover: float = 0.0,
) -> Candidate:
    uncached = PROMPT - cached
    return Candidate(
        ident=ident,
        cached_tokens=cached,
        uncached_tokens=uncached,
        prefill_ms=uncached * MS_PER_TOKEN,
        wait_ms=queued * MS_PER_TOKEN,
        backlog_ms=queued * MS_PER_TOKEN,
        queued_tokens=queued,
        delays=delays,
        in_flight=in_flight,
        kv_blocks=kv_blocks,
        prompt_blocks=10,
        itl_ms=itl_ms,
        turnover=turnover,
    )


def choose(policy: Policy, candidates: list[Candidate], session: str | None = None, seed: int = 0) -> str:
    best = min(candidates, key=lambda c: c.prefill_ms)
    demand = Demand(PROMPT, 256, best.cached_tokens, best.prefill_ms, session)
    generator = random.Random(seed)
    kept = policy.keep(demand, candidates, generator)
    chosen, _ = pick(kept, [policy.score(demand, c)["total"] for c in kept], generator)
    policy.chosen(chosen)
    return chosen.ident


@pytest.mark.parametrize(
    ("name", "candidates", "right"),
    [
        # a: 0 + 20 + 0; b: 0 + 100 + regret 80
        ("ttft_regret", [worker("a", cached=800), worker("b")], "a"),
        # a: 150 + 20; b: 100 + 80: the regret of 80 keeps it at the prefix
        ("ttft_regret", [worker("a", cached=800, queued=1500), worker("b")], "a"),
        # a: 170 + 20; b: 180: now the queue costs more than computing it elsewhere
        ("ttft_regret", [worker("a", cached=800, queued=1700), worker("b")], "b"),
        # plain TTFT would go: a 170, b 100
        ("min_ttft", [worker("a", cached=800, queued=1500), worker("b")], "b"),
        # a: 100 + 2 * 100 made to wait; b: 250 + 100
        ("ttft_regret", [worker("a", delays=2), worker("b", queued=2500)], "a"),
        ("ttft_regret", [worker("a", delays=3), worker("b", queued=2500)], "b"),
        # equal but for what they overwrite
        ("ttft_regret", [worker("a", turnover=0.2), worker("b", turnover=-0.2)], "b"),
        ("least_loaded", [worker("a", in_flight=3), worker("b", in_flight=2, queued=9000)], "b"),
        # a: 500 + 200; b: 0 + 1000
        ("least_tokens", [worker("a", cached=800, queued=500), worker("b")], "a"),
        # a: 700 * 21 = 14,700; b: 1000 * 1
        ("lmetric", [worker("a", cached=800, queued=500, kv_blocks=20), worker("b")], "b"),
        # a: 2 + 20 + 10; b: 10 + 0 + 10: twelve decode blocks weigh like a whole prompt
        ("dynamo_linear", [worker("a", cached=800, kv_blocks=20), worker("b")], "b"),
        ("dynamo_linear", [worker("a", cached=800, kv_blocks=7), worker("b")], "a"),
        # counts even enough: longest match, however long its queue
        ("cache_aware", [worker("a", cached=800, queued=9000, in_flight=60), worker("b")], "a"),
        # 65 > 64 and 65 > 1.5 * 0: fewest requests
        ("cache_aware", [worker("a", cached=800, in_flight=65), worker("b")], "b"),
        # warm at 80 %; 13.9 s of queue are not saturated, 14.1 s are
        ("sticky", [worker("a", cached=800, queued=139_000), worker("b")], "a"),
        ("sticky", [worker("a", cached=800, queued=141_000), worker("b")], "b"),
        # 79 % is not warm: a 9,210; b 1,000
        ("sticky", [worker("a", cached=790, queued=9000), worker("b")], "b"),
    ],
)
def test_choice(name: str, candidates: list[Candidate], right: str) -> None:
    assert choose(make_policy(name), candidates) == right


@pytest.mark.parametrize("weight", [0.0, 0.5, 4.0])
def test_regret_weight_is_the_price_of_a_cold_worker(weight: float) -> None:
    """Spreads exactly when the queue costs (1 + weight) times what the prefix saves, 80 ms."""
    policy = make_policy("ttft_regret", regret_weight=weight)
    limit = round((1 + weight) * 800)
    assert choose(policy, [worker("a", cached=800, queued=limit - 10), worker("b")]) == "a"
    assert choose(policy, [worker("a", cached=800, queued=limit + 10), worker("b")]) == "b"


def test_session_is_a_soft_term() -> None:
    policy = make_policy("ttft_regret")
    assert choose(policy, [worker("a"), worker("b", queued=40)], session="b") == "b"
    assert choose(policy, [worker("a"), worker("b", queued=60)], session="b") == "a"


def test_round_robin_takes_turns() -> None:
    policy = make_policy("round_robin")
    names = [choose(policy, [worker("a", queued=9000), worker("b"), worker("c")]) for _ in range(9)]
    assert all(set(names[i : i + 3]) == {"a", "b", "c"} for i in range(7))


def test_power_of_two_never_takes_the_worst() -> None:
    policy = make_policy("power_of_two")
    candidates = [worker("a", in_flight=1), worker("b", in_flight=2), worker("c", in_flight=3)]
    counts = Counter(choose(policy, candidates, seed=seed) for seed in range(300))
    assert counts["c"] == 0
    assert counts["a"] == pytest.approx(200, abs=40)


def test_tie_break_random() -> None:
    generator = random.Random(7)
    equals = [worker(name) for name in "abcd"]
    counts = Counter(pick(equals, [1.0] * 4, generator)[0].ident for _ in range(1000))
    assert all(200 < count < 300 for count in counts.values())
    again = random.Random(7)
    assert counts == Counter(pick(equals, [1.0] * 4, again)[0].ident for _ in range(1000))


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_overlap_lowers_prefill_cost(name: str) -> None:
    """In every policy that looks at work, a full match costs less than none."""
    demand = Demand(PROMPT, 256, 999, 0.1)
    policy = make_policy(name)
    candidates = [worker("warm", cached=999), worker("cold")]
    policy.keep(demand, candidates, random.Random(0))
    warm, cold = (policy.score(demand, c)["total"] for c in candidates)
    if name in ("round_robin", "least_loaded", "power_of_two"):
        assert warm == cold
    else:
        assert warm < cold


def test_decode_goes_to_the_least_itl_then_the_longest_match() -> None:
    policy, demand = make_policy("ttft_regret"), Demand(PROMPT, 256)
    score = {
        c.ident: policy.score_decode(demand, c)["total"]
        for c in (worker("a", itl_ms=12.0, cached=900), worker("b", itl_ms=10.0), worker("c", cached=500))
    }
    assert sorted(score, key=lambda ident: score[ident]) == ["c", "b", "a"]


def test_the_noise_of_the_models_does_not_pack_streams_on_one_worker() -> None:
    """Steps take as long whatever the batch is, and one worker's model says 0.5 % less."""
    policy, demand = make_policy("ttft_regret"), Demand(PROMPT, 256)
    streams = {"a": 0, "b": 0, "c": 0}
    for _ in range(24):
        workers = [
            worker(ident, itl_ms=19.9 if ident == "a" else 20.0, in_flight=n)
            for ident, n in streams.items()
        ]
        streams[min(workers, key=lambda c: policy.score_decode(demand, c)["total"]).ident] += 1
    assert max(streams.values()) - min(streams.values()) <= 2, streams


def test_bad_name_is_told_with_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match=r"router\.policy = 'fastest'; allowed: ttft_regret, round_robin"):
        make_policy("fastest")
    with pytest.raises(ConfigError, match="regret_weight"):
        make_policy("ttft_regret", regret_weight=-1)


def test_workers_without_room_are_left_out_unless_nobody_has_any() -> None:
    tight, roomy = worker("tight"), worker("roomy")
    tight.needs_blocks = roomy.needs_blocks = 13
    tight.room_blocks, roomy.room_blocks = 12, 13
    assert with_room([tight, roomy]) == [roomy]
    assert with_room([tight]) == [tight]


@pytest.mark.parametrize(
    ("cached", "best", "source", "uncached"),
    [
        (0, None, None, 1000),
        (0, ("x", 800), "x", 200),  # 1 + 4 + 20 < 100
        (790, ("x", 800), None, 210),  # 1.05 + 20 is no less than 21
        (800, ("x", 800), None, 200),
        (0, ("x", 1000), "x", 1),  # the last token is computed whatever is cached
    ],
    ids=["no pull", "pull", "too little to gain", "nothing to gain", "all cached there"],
)
def test_pull_when_cheaper(
    cached: int, best: tuple[str, int] | None, source: str | None, uncached: int
) -> None:
    models = WorkerModels.from_priors(prefill=(0.0, MS_PER_TOKEN, 0.0), move=(1.0, 0.005))
    way = cheapest_prefix(models, PROMPT, cached, best, PROMPT - 1)
    assert (way.source, way.uncached_tokens) == (source, uncached)
