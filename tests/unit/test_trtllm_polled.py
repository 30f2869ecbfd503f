"""What is polled: events into our hashes, statistics into a load, and pollers that hurt nobody."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from kvrouter.hashing import block_hashes, next_hash, token_bytes
from serving.engine.base import BlockStates, StoredRun
from serving.engine.trtllm.events import EventTranslator, namespace_of, salt_of
from serving.engine.trtllm.load import load_of
from serving.engine.trtllm.poller import Poller
from serving.engine.trtllm.stats import StatsReader

SIZE = 4
NS, OTHER = 0xABCDEF, 0x123456
TEXT = array("I", range(100, 116))  # four blocks
HASHES = block_hashes(TEXT, SIZE, NS)


def block(name: int | str, tokens: Sequence[int], salt: object = ...) -> dict[str, Any]:
    told: dict[str, Any] = {
        "type": "stored_block",
        "block_hash": name,
        "tokens": [{"type": "unique_token", "token_id": t, "token_extra_id": 0} for t in tokens],
        "cache_level": 0,
        "priority": 35,
    }
    return told if salt is ... else {**told, "cache_salt": salt}


def stored(parent: int | str | None, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"type": "stored", "parent_hash": parent, "blocks": list(blocks)}


def removed(*names: int | str) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(names)}


class Told:
    """An engine's stream of events, numbered as it numbers them."""

    def __init__(self) -> None:
        self.translator = EventTranslator(SIZE)
        self.translator.expect(TEXT, NS)
        self.next_id = 0

    def say(self, data: dict[str, Any], **envelope: Any) -> list[tuple[list[StoredRun], list[int]]]:
        event = {"event_id": self.next_id, "data": data, "window_size": 1024, **envelope}
        self.next_id = event["event_id"] + 1
        return self.translator.translate([event])  # type: ignore[return-value]

    def blocks(self, first: int, n: int, **salt: Any) -> list[dict[str, Any]]:
        """Of the text, named 10, 11, ..."""
        return [
            block(10 + at, TEXT[at * SIZE : (at + 1) * SIZE].tolist(), **salt)
            for at in range(first, first + n)
        ]

    @property
    def found(self) -> set[int]:
        return {name for run in self.translator.chains() for name in run.hashes}


def test_a_chain_is_told_in_our_hashes() -> None:
    told = Told()
    assert told.say({"type": "created", "num_blocks_per_cache_level": [512, 64]}) == []
    assert told.translator.total_blocks == 512
    assert told.say(stored(None, *told.blocks(0, 2))) == [([StoredRun(None, HASHES[:2])], [])]
    assert told.say(stored(11, *told.blocks(2, 1))) == [([StoredRun(HASHES[1], [HASHES[2]])], [])]
    assert told.say(stored(11, *told.blocks(2, 1))) == []  # told twice
    assert told.say(removed(12)) == [([], [HASHES[2]])]
    assert told.say(removed(12)) == []
    assert told.translator.chains() == [StoredRun(None, HASHES[:2])]


def test_a_salt_that_is_told_names_the_namespace() -> None:
    told = Told()
    told.translator.expect(TEXT, OTHER)
    (steps,) = told.say(stored(None, *told.blocks(0, 1, salt=salt_of(OTHER))))
    assert steps[0] == [StoredRun(None, [block_hashes(TEXT[:SIZE], SIZE, OTHER)[0]])]
    # One that is not ours: somebody else's request, a probe.
    assert told.say(stored(None, block(77, [1, 2, 3, 4], salt="not-ours"))) == []
    # A salt of ours for a prompt that was forgotten says enough at a prompt's start.
    (steps,) = told.say(stored(None, block(78, [1, 2, 3, 4], salt=salt_of(NS))))
    assert steps[0] == [StoredRun(None, [next_hash(NS, token_bytes(array("I", [1, 2, 3, 4])))])]


@pytest.mark.parametrize("salt", [None, "", "zz", "0" * 17, 5])
def test_salts_that_are_none_of_ours(salt: object) -> None:
    assert namespace_of(salt) is None


def test_without_a_told_salt_the_prompts_that_were_sent_tell_it() -> None:
    told = Told()
    told.translator.expect(TEXT, OTHER)
    first = told.say(stored(None, *told.blocks(0, 1)))
    other = told.say(stored(None, block(99, TEXT[:SIZE].tolist())))  # the same text, salted otherwise
    names = {steps[0][0].hashes[0] for (steps,) in (first, other)}
    assert names == {block_hashes(TEXT[:SIZE], SIZE, ns)[0] for ns in (NS, OTHER)}


def test_a_gap_clears_what_is_known_and_goes_on() -> None:
    told = Told()
    told.say(stored(None, *told.blocks(0, 3)))
    told.next_id += 5
    ((runs, gone),) = told.say(removed(5))
    assert (runs, set(gone)) == ([], set(HASHES[:3]))
    assert told.translator.counts["gaps"] == 1
    # What follows an unknown parent is placed by the prompts that were sent, when its own parent is held.
    assert told.say(stored(12, *told.blocks(3, 1))) == []
    assert told.translator.counts["orphans"] == 1
    told.say(stored(None, *told.blocks(0, 1)))
    assert told.found == {HASHES[0]}


def test_a_restart_begins_to_count_anew() -> None:
    told = Told()
    told.say(stored(None, *told.blocks(0, 3)))
    told.next_id = 0
    ((runs, gone),) = told.say(stored(None, *told.blocks(0, 1)))
    assert set(gone) == set(HASHES[:3])
    assert runs == [StoredRun(None, HASHES[:1])]
    assert told.found == {HASHES[0]}


def test_ranks_count_by_themselves() -> None:
    told = Told()
    told.say(stored(None, *told.blocks(0, 2)), event_id=0, attention_dp_rank=0)
    told.say(stored(None, *told.blocks(0, 2)), event_id=0, attention_dp_rank=1)
    told.say(removed(11), event_id=1, attention_dp_rank=1)
    assert told.found == set(HASHES[:2])  # rank 0 has it still
    ((_, gone),) = told.say(removed(11), event_id=1, attention_dp_rank=0)
    assert gone == [HASHES[1]]
    assert told.translator.counts["gaps"] == 0


def test_the_largest_window_alone_counts() -> None:
    told = Told()
    told.say({"type": "created", "num_blocks_per_cache_level": [64]}, window_size=128)
    told.say({"type": "created", "num_blocks_per_cache_level": [512]}, window_size=1024)
    assert told.translator.total_blocks == 512
    assert told.say(stored(None, *told.blocks(0, 2)), window_size=128) == []
    told.say(stored(None, *told.blocks(0, 2)))
    assert told.say(removed(10, 11), window_size=128) == []
    assert told.found == set(HASHES[:2])


def test_a_tail_is_never_found_nor_missed() -> None:
    told = Told()
    told.say(stored(None, *told.blocks(0, 1), block(50, TEXT[4:6].tolist())))
    assert told.found == {HASHES[0]}
    assert told.say(removed(50)) == []
    assert told.translator.counts["tails"] == 1


def test_a_demotion_is_no_removal() -> None:
    told = Told()
    told.say(stored(None, *told.blocks(0, 2)))
    level = {"type": "event_diff", "old_value": 0, "new_value": 1}
    updated = {"type": "updated", "block_hash": 11, "cache_level": level, "priority": None}
    assert told.say(updated) == []
    assert told.say({**updated, "cache_level": None}) == []  # trtllm 4666: a null diff
    assert told.found == set(HASHES[:2])


@pytest.mark.parametrize("spelling", ["hex", "signed"])
def test_hashes_are_hex_or_signed(spelling: str) -> None:
    told = Told()
    big = (1 << 64) - 7
    names: tuple[int | str, int | str] = ("00ff", "00fe") if spelling == "hex" else (big, 3)
    told.say(stored(None, block(names[0], TEXT[:4].tolist())))
    told.say(stored(names[0], block(names[1], TEXT[4:8].tolist())))
    assert told.found == set(HASHES[:2])
    told.say(removed("00ff" if spelling == "hex" else -7))
    assert HASHES[0] not in told.translator._held


def test_optional_keys_may_be_absent() -> None:
    told = Told()
    event = {"event_id": 0, "data": {"type": "stored", "blocks": told.blocks(0, 1)}}
    ((runs, _),) = told.translator.translate([event])
    assert runs == [StoredRun(None, HASHES[:1])]


def test_an_event_that_cannot_be_read_counts_as_a_gap() -> None:
    told = Told()
    told.say(stored(None, *told.blocks(0, 2)))
    ((_, gone),) = told.say({"type": "stored", "parent_hash": None, "blocks": [{"block_hash": None}]})
    assert set(gone) == set(HASHES[:2])
    assert told.translator.counts["malformed"] == 1
    assert told.translator.translate([None, {}, {"event_id": "x", "data": None}]) == []  # type: ignore[list-item]
    told.next_id = 9
    told.say(stored(None, *told.blocks(0, 1)))
    assert told.found == {HASHES[0]}


def test_stored_removed_and_stored_again_in_one_poll() -> None:
    told = Told()
    events = [
        {"event_id": n, "data": data, "window_size": 1024}
        for n, data in enumerate(
            (stored(None, *told.blocks(0, 1)), removed(10), stored(None, *told.blocks(0, 1)))
        )
    ]
    first, second = told.translator.translate(events)
    assert first == ([StoredRun(None, HASHES[:1])], [])
    # Within a step removals count first, so the last word is that it is there.
    assert second == ([StoredRun(None, HASHES[:1])], HASHES[:1])
    assert told.found == {HASHES[0]}


def test_a_snapshot_has_parents_before_children_and_no_orphans() -> None:
    told = Told()
    told.say(stored(None, *told.blocks(0, 3)))
    fork = array("I", [*TEXT[:4], 1, 2, 3, 4])
    told.translator.expect(fork, NS)
    told.say(stored(10, block(60, [1, 2, 3, 4])))
    runs = told.translator.chains()
    assert runs[0] == StoredRun(None, HASHES[:3])
    assert runs[1] == StoredRun(HASHES[0], [block_hashes(fork, SIZE, NS)[1]])
    told.say(removed(11))  # the middle one: what follows cannot be reached
    assert told.found == {HASHES[0], block_hashes(fork, SIZE, NS)[1]}


# ---------------------------------------------------------------- statistics


def row(number: int, *, queue: bool = True, batching: bool = True, **changes: Any) -> dict[str, Any]:
    batch: dict[str, Any] = {"numContextRequests": 1, "numGenRequests": 3, "numCtxTokens": 96}
    if queue:
        batch["numQueuedCtxTokens"] = 4000
    return {
        "iter": number,
        "iterLatencyMS": 20.0,
        "numActiveRequests": 4,
        "numQueuedRequests": 2,
        "kvCacheStats": {"maxNumBlocks": 100, "usedNumBlocks": 30, "tokensPerBlock": 32},
        "inflightBatchingStats": batch if batching else None,
        **changes,
    }


def test_newer_queue_fields_are_probed_and_never_zero() -> None:
    older, newer = StatsReader(), StatsReader()
    told = older.read([row(1, queue=False)])
    assert told is not None
    assert (told.queued_prompt_tokens, older.has_queue_fields) == (None, False)
    told = newer.read([row(1)])
    assert told is not None
    assert (told.queued_prompt_tokens, newer.has_queue_fields) == (4000, True)


def test_null_batching_says_nothing_of_the_batch() -> None:
    reader = StatsReader()
    told = reader.read([row(1, batching=False)])
    assert told is not None
    assert (told.prompt_tokens, told.decoding, told.queued_prompt_tokens) == (None, None, None)
    assert reader.has_queue_fields is None  # not a row that could have them
    assert told.used_blocks == 30
    assert reader.totals.prefill_seconds == reader.totals.decode_seconds == 0


def test_time_is_split_by_tokens_over_all_rows() -> None:
    reader = StatsReader()
    told = reader.read([row(1), row(2), row(3, batching=False)])
    assert told is not None
    assert (told.iteration, reader.totals.iterations) == (3, 3)
    assert reader.totals.prefill_seconds == pytest.approx(2 * 0.02 * 96 / 99)
    assert reader.totals.decode_seconds == pytest.approx(2 * 0.02 * 3 / 99)


def test_ranks_add_up_and_one_tells_the_queue() -> None:
    reader = StatsReader()
    told = reader.read([row(5, attentionDpRank=1, queue=False), row(5, attentionDpRank=0)])
    assert told is not None
    assert (told.total_blocks, told.used_blocks, told.active, told.queued) == (200, 60, 8, 2)
    assert told.queued_prompt_tokens == 4000


@pytest.mark.parametrize("broken", [{}, {"iter": 1}, {**row(1), "kvCacheStats": {}}])
def test_a_row_that_is_none(broken: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError)):
        StatsReader().read([broken])


def test_load_without_statistics_is_what_was_sent() -> None:
    from serving.engine.base import Mode
    from serving.engine.trtllm.live import Live, Stage
    from tests.unit.trtllm_rig import prompt, work

    lives = [
        Live(work(1, prompt(30)), Stage.COMPUTING, 0.0),
        Live(work(2, prompt(50)), Stage.COMPUTING, 0.0, started=True),
        Live(work(3, prompt(70), Mode.DECODE), Stage.MOVING, 0.0),
    ]
    blocks = BlockStates(100, 30, 0, 0, 0, 70)
    load = load_of(lives, None, blocks, step=7, n_drawn=1)
    assert (load.running, load.waiting, load.waiting_tokens) == (1, 2, 30)
    assert (load.step, load.batch_tokens, load.runnable) == (7, 1, True)
    older, newer = StatsReader().read([row(1, queue=False)]), StatsReader().read([row(1)])
    assert load_of(lives, older, blocks, step=7, n_drawn=1).waiting_tokens == 30
    assert load_of(lives, newer, blocks, step=7, n_drawn=1).waiting_tokens == 4000
    assert not load_of(lives[2:], newer, blocks, step=7, n_drawn=0).runnable  # KV on its way takes no step


def test_load_tells_what_an_iteration_decoded() -> None:
    """A prompt that waits, and KV on its way, are nothing that a step of decodes reads."""
    from serving.engine.base import Mode
    from serving.engine.trtllm.live import Live, Stage
    from tests.unit.trtllm_rig import prompt, work

    lives = [
        Live(work(1, prompt(30)), Stage.COMPUTING, 0.0),
        Live(work(2, prompt(50)), Stage.COMPUTING, 0.0, started=True, taken=4),
        Live(work(3, prompt(70), Mode.DECODE), Stage.MOVING, 0.0),
    ]
    blocks = BlockStates(100, 30, 0, 0, 0, 70)
    decoding, mixed = row(1), row(1)
    decoding["inflightBatchingStats"] |= {"numCtxTokens": 0, "numGenRequests": 1}
    mixed["inflightBatchingStats"] |= {"numCtxTokens": 30, "numGenRequests": 1}

    def decoded(stats: dict[str, Any] | None) -> tuple[int, int] | None:
        reading = None if stats is None else StatsReader().read([stats])
        return load_of(lives, reading, blocks, step=7, n_drawn=1).decoded

    assert decoded(decoding) == (1, 54)
    assert decoded(mixed) == (0, 0)
    assert decoded(None) is None


# ---------------------------------------------------------------- pollers


class Source:
    """Async iterators of what `batches` holds; an exception in it is raised."""

    def __init__(self, *batches: Any) -> None:
        self.batches = list(batches)
        self.asked = 0

    def __call__(self, timeout: float) -> Source:
        self.asked += 1
        self._now = iter(self.batches.pop(0) if self.batches else ())
        return self

    def __aiter__(self) -> Source:
        return self

    async def __anext__(self) -> Any:
        item = next(self._now, StopAsyncIteration)
        if isinstance(item, BaseException) or item is StopAsyncIteration:
            raise item
        return item


def test_a_poller_survives_whatever_the_engine_raises() -> None:
    source = Source([1, 2], [TypeError("NoneType")], [3, IndexError()], [ValueError()], [4])
    taken: list[list[int]] = []
    done = threading.Event()

    def take(items: list[int]) -> None:
        taken.append(items)
        if items == [3]:
            raise KeyError("ours")  # even that
        if items == [4]:
            done.set()

    poller = Poller("events", source, take, period_s=0.0005)
    poller.start()
    assert done.wait(10)
    poller.stop()
    assert taken == [[1, 2], [3], [4]]
    assert poller.errors == 3


def test_a_source_that_raises_at_once_is_tried_again_less_and_less() -> None:
    asked: list[float] = []

    def broken(timeout: float) -> Any:
        asked.append(timeout)
        raise RuntimeError("the engine is gone")

    poller = Poller("stats", broken, lambda items: None, period_s=0.001, timeout_s=0.5)
    poller.start()
    poller._thread.join(0.3)
    poller.stop()
    assert 2 <= len(asked) <= 12
    assert set(asked) == {0.5}
