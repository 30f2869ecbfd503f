"""Control and its parties over real links: members, scrapes, live settings, Control gone for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from serving import control_client, control_host
from serving.errors import ConfigError
from serving.link import Link, dial
from serving.live_settings import LiveSettings, parse_settings
from serving.metrics import Registry
from serving.wire import AnyMessage, MetricsPull, MetricsPush, Settings
from tests.unit.control_rig import KEY, LONG_S, Party, Rig
from tests.unit.handoff_fakes import until


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not look like a party that does not answer."""
    monkeypatch.setattr(control_host, "PULL_S", LONG_S)
    monkeypatch.setattr(control_client, "SCRAPE_S", LONG_S)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.control_starts()
    yield rig
    await rig.stop()


# ---------------------------------------------------------------- members and scrapes


async def test_parties_register(rig: Rig) -> None:
    for kind, ident in (("frontend", "f"), ("worker", "w")):
        await rig.joins(kind, ident)
    assert [(m.kind, m.ident, m.labels) for m in rig.host.members] == [
        ("frontend", "f", {"pool": "x"}),
        ("worker", "w", {"pool": "x"}),
    ]
    await rig.parties[1].client.stop()
    await rig.gone(rig.parties[1])
    assert [m.ident for m in rig.host.members] == ["f"]


async def test_a_scrape_right_after_a_request_counts_it_everywhere(rig: Rig) -> None:
    f, w1, w2 = (
        await rig.joins("frontend", "f"),
        await rig.joins("worker", "1"),
        await rig.joins("worker", "2"),
    )
    for n in range(1, 6):
        for party in (f, w1, w2):
            party.work()
        scraped = await f.scrape()
        assert scraped.requests == 3 * n
        assert scraped.series["kvrelay_scrapes_total", "control"] == n
    assert scraped.gauges["kvrelay_parties", "control,worker"] == 2
    assert scraped.gauges["kvrelay_open", "1"] == 3


async def test_scrapes_at_once_do_not_disturb_each_other(rig: Rig) -> None:
    f, w = await rig.joins("frontend", "f"), await rig.joins("worker", "w")
    f.work()
    w.work()
    many = await asyncio.gather(*(party.scrape() for party in (f, w) for _ in range(5)))
    assert [scraped.requests for scraped in many] == [2] * 10
    assert f.client._scrapes == w.client._scrapes == rig.host._scrapes == {}


async def test_two_frontends_show_counters_that_only_grow(rig: Rig) -> None:
    parties = [
        await rig.joins("frontend", "f1"),
        await rig.joins("frontend", "f2"),
        await rig.joins("worker", "w"),
    ]
    earlier = await parties[0].scrape()
    for n in range(12):
        parties[n % 3].work()
        scraped = await parties[n % 2].scrape()
        scraped.assert_not_below(earlier)
        assert scraped.requests == n + 1
        earlier = scraped


class Mute:
    """A party that answers one pull and then no more."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.pulls = 0

    def on_open(self, link: Link) -> None: ...

    def on_lost(self, link: Link, reason: str) -> None: ...

    def on_message(self, link: Link, message: AnyMessage) -> None:
        if isinstance(message, MetricsPull):
            self.pulls += 1
            if self.pulls == 1:
                link.send(MetricsPush(message.serial, self.registry.families()))


async def test_who_does_not_answer_in_time_stands_as_it_was(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, other = await rig.joins("frontend", "f"), Party("worker", "mute")
    mute = Mute(other.registry)
    link = await dial(rig.address, other.me, KEY, mute, timeout_s=LONG_S)
    await until(lambda: len(rig.host._parties) == 2, LONG_S)
    other.work()
    assert (await f.scrape()).requests == 1
    other.work()
    f.work()
    monkeypatch.setattr(control_host, "PULL_S", 0.1)
    assert (await f.scrape()).requests == 2  # its last one, and ours
    assert mute.pulls == 2
    link.close("done")


async def test_a_party_lost_during_the_scrape_is_not_waited_for(rig: Rig) -> None:
    f, other = await rig.joins("frontend", "f"), Party("worker", "mute")
    mute = Mute(other.registry)
    mute.pulls = 1
    link = await dial(rig.address, other.me, KEY, mute, timeout_s=LONG_S)
    await until(lambda: len(rig.host._parties) == 2, LONG_S)
    f.work()
    scrape = asyncio.create_task(f.scrape())
    await until(lambda: mute.pulls == 2, LONG_S)
    link.close("crash")
    assert (await scrape).requests == 1


async def test_departed_parties_stay_in_every_sum_and_their_gauges_go(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, w1, w2 = (
        await rig.joins("frontend", "f"),
        await rig.joins("worker", "1"),
        await rig.joins("worker", "2"),
    )
    for party in (w1, w2):
        party.work(5)
    before = await f.scrape()
    assert before.requests == 10
    w1.work()  # after the last scrape: it says so when it stops
    await w1.client.stop()
    await rig.gone(w1)
    after = await f.scrape()
    after.assert_not_below(before)
    assert after.requests == 11
    assert ("kvrelay_open", "1") not in after.gauges
    assert ("kvrelay_open", "2") in after.gauges
    # When it has been away for long it becomes one of "the departed".
    monkeypatch.setattr(control_host, "ABSENT_S", 0.0)
    await w2.client.stop()
    await rig.gone(w2)
    await until(lambda: len(rig.host._absent) == 1, LONG_S)
    last = await f.scrape()
    assert last.requests == 11
    assert last.series["kvrelay_requests_total", "departed,stop"] == 5
    assert last.gauges["kvrelay_parties", "control,frontend"] == 1


async def test_no_sum_falls_when_control_is_replaced(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    f, w1, w2 = [await rig.joins(*who) for who in (("frontend", "f"), ("worker", "1"), ("worker", "2"))]
    for party in (w1, w2):
        party.work(5)
    await w1.client.stop()
    await rig.gone(w1)
    before = await f.scrape()
    counted = rig.host.counted()
    await rig.host.stop()
    await rig.control_starts()
    rig.host.take_over(counted)
    await rig.registered("f")
    after = await f.scrape()  # before or after worker 2 found the new one
    after.assert_not_below(before, but="kvrelay_scrapes_total")
    await rig.registered("2")
    assert (await f.scrape()).requests == before.requests == 10
    rig.host.take_over(b"of another version")
    assert (await f.scrape()).requests == 10


async def test_a_party_that_lost_its_link_and_came_back_counts_once(rig: Rig) -> None:
    f, w = await rig.joins("frontend", "f"), await rig.joins("worker", "w")
    w.work(5)
    before = await f.scrape()
    for n in range(1, 4):
        rig.link_of(w).close("a blip")
        await rig.gone(w)
        w.work()
        await rig.registered("w")
        scraped = await f.scrape()
        scraped.assert_not_below(before)
        assert scraped.requests == 5 + n


async def test_a_party_that_comes_back_before_its_old_link_is_missed_counts_once(rig: Rig) -> None:
    f, w = await rig.joins("frontend", "f"), await rig.joins("worker", "w")
    w.work(5)
    await f.scrape()
    again = Party("worker", "w")
    mute = Mute(again.registry)
    link = await dial(rig.address, w.me, KEY, mute, timeout_s=LONG_S)  # the same incarnation
    await until(lambda: mute.pulls or len(rig.host._parties) == 2, LONG_S)
    again.work(6)
    assert (await f.scrape()).requests == 6
    link.close("done")


async def test_a_new_incarnation_of_a_name_adds_to_the_old_one(rig: Rig) -> None:
    f, w = await rig.joins("frontend", "f"), await rig.joins("worker", "w")
    w.work(5)
    await f.scrape()
    await w.client.stop()
    await rig.gone(w)
    again = await rig.joins("worker", "other name")
    again.work(2)
    assert (await f.scrape()).requests == 7


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"weigths": {}}, r"unknown key weigths; did you mean weights\?", id="unknown"),
        pytest.param({"log_level": "LOUD"}, r"log_level = 'LOUD'; allowed: DEBUG, INFO", id="value"),
        pytest.param(
            {"weights": {"m": {"a": -1}}}, r"weights.*allowed: a number, 0 or more", id="negative"
        ),
        pytest.param({"weights": [1]}, r"weights = \[1\]; allowed: a mapping", id="type"),
        pytest.param({"log_level": "DEBUG", "x": 1}, "unknown key x", id="one_good_one_bad"),
    ],
)
async def test_a_bad_change_is_one_clear_error_and_changes_nothing(
    rig: Rig, changes: dict[str, Any], says: str
) -> None:
    f = await rig.joins("frontend", "f")
    await until(lambda: f.heard, LONG_S)
    before = rig.host.settings
    with pytest.raises(ConfigError, match=says) as caught:
        rig.host.change_settings(changes)
    assert "\n" not in caught.value.message
    assert rig.host.settings == before
    assert rig.saved == []
    rig.host.change_settings({"log_level": "ERROR"})
    await until(lambda: len(f.heard) == 2, LONG_S)  # nothing was published in between
    assert f.heard[1].log_level == "ERROR"


async def test_changes_reach_everybody_and_late_joiners(rig: Rig) -> None:
    parties = [await rig.joins("frontend", "f"), await rig.joins("worker", "w")]
    assert rig.host.change_settings({"weights": {"m": {"a": 1, "b": 3}}})["log_level"] == "INFO"
    rig.host.change_settings({"log_level": "DEBUG"})
    parties.append(await rig.joins("frontend", "late"))
    wanted = LiveSettings(log_level="DEBUG", weights={"m": {"a": 1, "b": 3}})
    for party in parties:
        await until(lambda party=party: party.heard and party.heard[-1] == wanted, LONG_S)


async def test_settings_outlive_control(rig: Rig) -> None:
    f = await rig.joins("frontend", "f")
    rig.host.change_settings({"log_level": "DEBUG"})
    await rig.host.stop()
    await until(lambda: not f.client.connected, LONG_S)
    f.heard.clear()
    await rig.control_starts(parse_settings(rig.saved[-1]))
    assert rig.host.settings == rig.saved[-1]
    await until(lambda: f.heard, LONG_S)
    assert f.heard == [LiveSettings(log_level="DEBUG")]


async def test_what_cannot_be_kept_is_not_published(rig: Rig) -> None:
    f = await rig.joins("frontend", "f")
    await until(lambda: f.heard, LONG_S)

    def fails(values: dict[str, Any]) -> None:
        raise OSError("the store is away")

    rig.host._save = fails
    with pytest.raises(OSError, match="away"):
        rig.host.change_settings({"log_level": "DEBUG"})
    assert rig.host.settings["log_level"] == "INFO"
    await f.scrape()  # anything published before would have come before
    assert [s.log_level for s in f.heard] == ["INFO"]


async def test_settings_of_a_newer_control_leave_ours_as_they_are(rig: Rig) -> None:
    f = await rig.joins("frontend", "f")
    await until(lambda: f.heard, LONG_S)
    rig.link_of(f).send(Settings(9, {"log_level": "DEBUG", "of_tomorrow": 1}))
    await f.scrape()
    assert [s.log_level for s in f.heard] == ["INFO"]


# ---------------------------------------------------------------- Control away


async def test_without_control_the_last_state_with_our_own_part_fresh(rig: Rig) -> None:
    f, w = await rig.joins("frontend", "f"), await rig.joins("worker", "w")
    f.work()
    w.work(3)
    before = await f.scrape()
    await rig.host.stop()
    await until(lambda: not f.client.connected, LONG_S)
    for n in range(1, 4):
        f.work()
        w.work()
        scraped = await f.scrape()
        scraped.assert_not_below(before)
        assert scraped.requests == 4 + n
        before = scraped
    await rig.control_starts()
    await rig.registered("f", "w")
    back = await f.scrape()
    assert back.requests == 10
    back.series["kvrelay_scrapes_total", "control"] += 1  # its own count starts anew
    back.assert_not_below(before)


async def test_before_control_was_ever_there_our_own_part_alone() -> None:
    f = Party("frontend", "f")
    f.work()
    assert (await f.scrape()).requests == 1
    assert not f.client.connected
    await f.client.stop()


async def test_control_lost_during_a_scrape_is_answered_at_once(rig: Rig) -> None:
    f, other = await rig.joins("frontend", "f"), Party("worker", "mute")
    mute = Mute(other.registry)
    mute.pulls = 1
    link = await dial(rig.address, other.me, KEY, mute, timeout_s=LONG_S)
    await until(lambda: len(rig.host._parties) == 2, LONG_S)
    f.work()
    scrape = asyncio.create_task(f.scrape())
    await until(lambda: mute.pulls == 2, LONG_S)
    await rig.host.stop()
    assert (await asyncio.wait_for(scrape, LONG_S / 2)).requests == 1
    assert link.closed


async def test_parties_follow_control_to_another_address(rig: Rig) -> None:
    f = await rig.joins("frontend", "f")
    old, old_address = rig.host, rig.address
    rig.address = "127.0.0.1:0"
    await rig.control_starts()
    await asyncio.gather(f.client.connect(old_address), f.client.connect(rig.address))
    await rig.registered("f")
    await until(lambda: not old.members, LONG_S)
    f.work()
    assert (await f.scrape()).requests == 1
    await old.stop()


async def test_of_two_moves_at_once_the_last_one_stands(rig: Rig) -> None:
    first, first_address = rig.host, rig.address
    rig.address = "127.0.0.1:0"
    await rig.control_starts()
    second, second_address = rig.host, rig.address
    rig.address = "127.0.0.1:0"
    await rig.control_starts()
    f = Party("frontend", "f")
    rig.parties.append(f)
    await f.client.connect(first_address)
    await until(lambda: first.members, LONG_S)
    await asyncio.gather(f.client.connect(second_address), f.client.connect(rig.address))
    await rig.registered("f")
    await until(lambda: not first.members and not second.members, LONG_S)
    assert [member.ident for member in rig.host.members] == ["f"]
    await first.stop()
    await second.stop()
