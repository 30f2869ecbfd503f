"""Bodies that come slowly: they hold no place of a generation, and make room for whoever comes next."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from serving import bodies as bodies_module
from serving.api_keys import ApiKeys
from serving.bodies import Bodies, BodyLimits
from serving.config import load_config
from serving.config_review import Level
from serving.door import Door
from serving.errors import BodyTimeout, Overcrowded
from serving.preflight import IMPORT_PATH, Plan
from serving.review_serving import serving_findings
from tests.scripted import Client, ScriptedGenerator, make_client
from tests.unit.handoff_fakes import until
from tests.unit.review_rig import sim

KEYS = {"a": "alice-0123456789abcdef", "b": "bob-0123456789abcdef"}


class Slow:
    """A client whose body comes when the test says so."""

    def __init__(self, key: str | None = None) -> None:
        self._parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.said: list[Any] = []
        self.headers = [] if key is None else [(b"authorization", b"Bearer " + KEYS[key].encode())]

    async def receive(self) -> dict[str, Any]:
        return await self._parts.get()

    async def send(self, message: Any) -> None:
        self.said.append(dict(message))

    def give(self, part: bytes, *, last: bool = False) -> None:
        self._parts.put_nowait({"type": "http.request", "body": part, "more_body": not last})

    def ask(self, client: Client) -> asyncio.Future[None]:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": self.headers}
        return asyncio.ensure_future(client.api(scope, self.receive, self.send))

    @property
    def status(self) -> int:
        return int(self.said[0]["status"]) if self.said else 0


BODY = orjson.dumps({"model": "tiny", "prompt": "one two"})


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies_module, "SLOW_S", 0.05)
    monkeypatch.setattr("serving.door.SWALLOW_S", 0.01)


@pytest.fixture
async def asking() -> AsyncIterator[Callable[..., Slow]]:
    tasks: list[asyncio.Future[None]] = []

    def ask(client: Client, key: str | None = None, part: bytes = BODY[:5]) -> Slow:
        slow = Slow(key)
        slow.give(part)
        tasks.append(slow.ask(client))
        return slow

    yield ask
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_slow_bodies_take_no_place_of_a_generation(asking: Callable[..., Slow]) -> None:
    refused: list[str] = []
    door = Door(max_inflight=4, on_refused=refused.append)
    client = make_client(door=door)
    slow = [asking(client) for _ in range(8)]
    await asyncio.sleep(0.1)
    assert (await client.complete()).status == 200
    assert (door._inside, refused) == (0, [])
    slow[0].give(BODY[5:], last=True)  # and it is served when it is here
    await until(lambda: slow[0].status == 200)


async def test_while_all_places_are_taken_nothing_is_read(asking: Callable[..., Slow]) -> None:
    refused: list[str] = []
    generator = ScriptedGenerator(hang=True)
    door = Door(max_inflight=1, on_refused=refused.append)
    first = make_client(generator, door=door)
    running = asyncio.ensure_future(first.complete())
    await until(lambda: len(generator.requests) == 1)
    unread = asking(first)
    await until(lambda: unread.status == 429)
    assert unread._parts.qsize() == 1, "not even its first part"
    assert refused == ["inflight"]
    first.leave.set()
    await running


async def test_a_body_that_is_here_when_the_places_are_taken_is_refused(
    asking: Callable[..., Slow],
) -> None:
    refused: list[str] = []
    generator = ScriptedGenerator(hang=True)
    client = make_client(generator, door=Door(max_inflight=1, on_refused=refused.append))
    slow = asking(client)
    await asyncio.sleep(0.01)
    running = asyncio.ensure_future(client.complete())
    await until(lambda: len(generator.requests) == 1)
    slow.give(BODY[5:], last=True)
    await until(lambda: slow.status == 429)
    assert refused == ["inflight"], "the planner hears of it as of any other"
    client.leave.set()
    await running


async def test_the_one_that_is_slow_for_longest_makes_room(asking: Callable[..., Slow]) -> None:
    refused: list[str] = []
    limits = BodyLimits(most_slow=2)
    client = make_client(door=Door(bodies=limits, on_refused=refused.append))
    slow = []
    for _ in range(3):
        slow.append(asking(client))
        await asyncio.sleep(0.02)
    young = [asking(client) for _ in range(5)]
    assert not any(one.said for one in slow), "none is slow yet"
    await until(lambda: bool(slow[0].said))
    assert slow[0].status == 429
    assert (b"connection", b"close") in slow[0].said[0]["headers"]
    assert b"retry-after" in dict(slow[0].said[0]["headers"])
    assert refused[0] == "bodies"
    for one in young:  # they are here in time
        one.give(BODY[5:], last=True)
    await until(lambda: all(one.status == 200 for one in young))
    slow[2].give(BODY[5:], last=True)
    await until(lambda: slow[2].status == 200)
    assert not slow[1].said
    assert (await client.complete()).status == 200


async def test_one_key_crowds_out_its_own(tmp_path: Path, asking: Callable[..., Slow]) -> None:
    path = tmp_path / "keys"
    path.write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
    refused: list[str] = []
    limits = BodyLimits(most_slow=3, most_slow_per_key=1)
    client = make_client(door=Door(keys=ApiKeys(str(path)), bodies=limits, on_refused=refused.append))
    bob = asking(client, "b")
    await asyncio.sleep(0.08)
    first, second = asking(client, "a"), asking(client, "a")
    await until(lambda: first.status == 429)
    assert refused == ["key_bodies"]
    for one in (bob, second):
        one.give(BODY[5:], last=True)
    await until(lambda: (bob.status, second.status) == (200, 200))


class Reading:
    """One body, read straight."""

    def __init__(self, bodies: Bodies, tenant: str | None = None) -> None:
        self.slow = Slow()
        self.task = asyncio.ensure_future(bodies.read(self.slow.receive, None, tenant))

    async def give(self, n_bytes: int, *, last: bool = False) -> None:
        self.slow.give(b"x" * n_bytes, last=last)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (BodyLimits(held_bytes=100), "bodies"),
        (BodyLimits(held_bytes=1000, held_bytes_per_key=100), "key_bodies"),
    ],
    ids=["all", "key"],
)
async def test_the_bytes_of_unfinished_bodies_are_bounded(limits: BodyLimits, reason: str) -> None:
    refused: list[str] = []
    bodies = Bodies(limits, refused.append)
    old, young = Reading(bodies, "a"), Reading(bodies, "a")
    await old.give(60)
    await young.give(30)
    await young.give(20)  # nobody is slow: it is the one that is too much
    with pytest.raises(Overcrowded):
        await young.task
    assert (refused, bodies._held) == ([reason], 60)
    await asyncio.sleep(0.06)
    other = Reading(bodies, "a")
    await other.give(70)  # the slow one leaves
    with pytest.raises(Overcrowded):
        await old.task
    assert (refused, bodies._held) == ([reason] * 2, 70)
    await other.give(29, last=True)
    assert len(await other.task) == 99
    whole = Reading(bodies, "a")
    await whole.give(5000, last=True)  # it is here: nothing to bound
    assert len(await whole.task) == 5000
    assert (bodies._held, bodies._held_by_tenant, bodies._slow) == (0, {}, {})


@pytest.mark.parametrize("body_s", [0.03, 0.2], ids=["before-it-is-slow", "after"])
async def test_a_body_has_one_deadline(body_s: float) -> None:
    refused: list[str] = []
    bodies = Bodies(BodyLimits(body_s=body_s), refused.append)
    began_s = asyncio.get_running_loop().time()
    reading = Reading(bodies)
    while not reading.task.done():  # it never stops to come
        await reading.give(1)
        await asyncio.wait([reading.task], timeout=0.01)
    assert isinstance(reading.task.exception(), BodyTimeout)
    assert body_s - 0.01 <= asyncio.get_running_loop().time() - began_s < body_s + 0.5
    assert refused == ["body_timeout"]
    assert (bodies._held, bodies._slow) == (0, {})


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("frontend", "keys", "level", "where"),
    [
        ({}, True, None, ""),
        ({"body_limit_bytes": 1 << 30}, False, Level.ERROR, "frontend.unread_bytes"),
        ({"body_limit_bytes": 200 << 20}, True, Level.ERROR, "frontend.unread_bytes_per_key"),
        ({"body_limit_bytes": 200 << 20}, False, None, ""),
        ({"max_slow_bodies": 16}, True, Level.WARNING, "frontend.max_slow_bodies_per_key"),
        ({"unread_bytes": 64 << 20}, True, Level.WARNING, "frontend.unread_bytes_per_key"),
        ({"unread_bytes": 64 << 20}, False, None, ""),
    ],
)
def test_check_says_what_can_never_be_read(
    frontend: dict[str, int], keys: bool, level: Level | None, where: str, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text(f"a:{KEYS['a']}\n")
    security = {"api_keys_file": str(tmp_path / "keys")} if keys else {}
    application = load_config({**sim(), "frontend": frontend, "security": security})
    plan = Plan(Path("serve.yaml"), {"applications": [{"import_path": IMPORT_PATH}]}, (application,))
    found = [(finding.level, finding.where) for finding in serving_findings(plan)]
    assert found == ([] if level is None else [(level, where)])
