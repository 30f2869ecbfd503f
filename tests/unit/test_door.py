"""Keys, limits and slow clients at the door, and what a key makes of a request."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from serving import door as door_module
from serving.api_keys import ApiKeys, parse_keys
from serving.bodies import BodyLimits
from serving.config import load_config
from serving.door import Door
from serving.errors import AuthenticationFailed, ConfigError
from tests.scripted import Client, Reply, ScriptedGenerator, make_client
from tests.unit.handoff_fakes import until

ALICE, BOB, BARE = "alice-0123456789abcdef", "bob-0123456789abcdef", "bare-0123456789abcdef"
LINES = f"# who may ask\nalice:{ALICE}\n\nbob:{BOB}\n{BARE}\n"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(LINES)
    return path


@pytest.fixture
def keys(path: Path, clock: Clock) -> ApiKeys:
    return ApiKeys(str(path), clock)


def bearer(key: str) -> bytes:
    return b"Bearer " + key.encode()


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize(
    ("key", "name"), [(ALICE, "alice"), (BOB, "bob"), (BARE, "key-")], ids=["alice", "bob", "bare"]
)
def test_a_key_names_its_tenant(keys: ApiKeys, key: str, name: str) -> None:
    tenant = keys.tenant(bearer(key))
    assert tenant.name.startswith(name)
    assert key not in tenant.name
    assert key not in tenant.salt
    assert keys.tenant(b"bearer   " + key.encode()) == tenant


@pytest.mark.parametrize(
    "header",
    [None, b"", b"Bearer", b"Bearer ", bearer(ALICE[:-1]), bearer(ALICE + "x"), b"Basic " + ALICE.encode(),
     ALICE.encode(), bearer(f"alice:{ALICE}"), bearer("alice"), b"Bearer \xff\xfe",
     bearer(f"{ALICE} {BOB}")],
)  # fmt: skip
def test_anything_else_is_refused(keys: ApiKeys, header: bytes | None) -> None:
    with pytest.raises(AuthenticationFailed) as caught:
        keys.tenant(header)
    assert ALICE not in caught.value.message


def test_two_keys_of_one_name_are_one_tenant_and_salts_differ_between_tenants() -> None:
    found = parse_keys(f"a:{ALICE}\na:{BOB}\nb:{BARE}\n".encode())
    tenants = [tenant for _, tenant in found]
    assert tenants[0] is tenants[1]
    assert tenants[0].salt != tenants[2].salt
    assert all(len(tenant.salt) == 64 for tenant in tenants)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no key"),
        ("# nothing\n\n", "no key"),
        ("a:short", "line 1"),
        (f"{ALICE}\nwith space {BOB}", "line 2"),
        (f"bad name:{ALICE}", "line 1"),
        (f":{ALICE}", "line 1"),
        (f"a:{ALICE}\nb:{ALICE}", "line 2"),
        (f"a:{ALICE}é", "line 1"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_config_error(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        ApiKeys(str(path))
    assert ALICE not in caught.value.message
    assert "\n" not in caught.value.message


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"security\.api_keys_file = .*: No such file"):
        ApiKeys(str(tmp_path / "none"))


def test_edits_count_without_a_restart_and_bad_ones_change_nothing(
    keys: ApiKeys, path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvrelay.api")

    def edit(text: str | None, age_s: int) -> None:
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
            os.utime(path, (age_s, age_s))
        clock.now += 2.0

    edit(f"bob:{BOB}\n", 1)
    keys.tenant(bearer(BOB))
    with pytest.raises(AuthenticationFailed):
        keys.tenant(bearer(ALICE))
    for broken in ("", "bob:short\n", None):
        caplog.clear()
        edit(broken, 2)
        for _ in range(5):
            assert keys.tenant(bearer(BOB)).name == "bob"
            clock.now += 2.0
        lines = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
        assert len(lines) == 1, lines
        assert "stay as they were" in lines[0]
    edit(f"alice:{ALICE}\n", 3)
    assert keys.tenant(bearer(ALICE)).name == "alice"
    with pytest.raises(AuthenticationFailed):
        keys.tenant(bearer(BOB))


def test_the_file_is_not_looked_at_for_every_request(
    keys: ApiKeys, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    monkeypatch.setattr(ApiKeys, "_look", lambda self: looks.append(clock.now))
    for _ in range(100):
        keys.tenant(bearer(BOB))
        clock.now += 0.1
    assert len(looks) <= 10


# ---------------------------------------------------------------- over HTTP


def client_of(door: Door, generator: ScriptedGenerator | None = None, **settings: Any) -> Client:
    return make_client(generator, door=door, **settings)


async def send(client: Client, method: str, path: str, key: str | None = None, **headers: str) -> Reply:
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    body = {"model": "tiny", "prompt": "one two"} if method == "POST" else None
    return await client.send(method, path, body, headers)


@pytest.mark.parametrize(
    ("method", "route"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/tiny"),
        ("GET", "/v1/models/none"),
        ("GET", "/v1/completions"),
        ("GET", "/v1/nothing"),
        ("GET", "/metrics"),
    ],
)
async def test_without_a_key_it_is_401(keys: ApiKeys, method: str, route: str) -> None:
    refused: list[str] = []
    client = client_of(Door(keys=keys, on_refused=refused.append))
    for key in (None, "wrong-0123456789abcdef"):
        reply = await send(client, method, route, key)
        assert reply.status == 401
        assert reply.json["error"]["code"] == "invalid_api_key"
        assert reply.json["error"]["type"] == "authentication_error"
        assert reply.headers["www-authenticate"].startswith("Bearer")
    assert refused == ["unauthorized"] * 2
    assert (await send(client, method, route, ALICE)).status != 401


async def test_health_stays_open_and_the_admin_key_reads_metrics_only(keys: ApiKeys) -> None:
    client = client_of(Door(keys=keys, admin_key=b"admin-key"), debug={"/debug/x": lambda: {}})
    assert (await send(client, "GET", "/health")).status == 200
    assert (await send(client, "GET", "/metrics", "admin-key")).status == 200
    assert (await send(client, "GET", "/v1/models", "admin-key")).status == 401
    assert (await send(client, "GET", "/debug/x", ALICE)).status == 401
    assert (await send(client, "GET", "/debug/x", "admin-key")).status == 200


async def test_without_keys_everything_is_open() -> None:
    client = client_of(Door())
    assert (await send(client, "GET", "/metrics")).status == 200
    assert (await send(client, "GET", "/v1/models")).status == 200


@pytest.mark.parametrize("own", [None, "my-salt"], ids=["default", "own"])
async def test_the_key_makes_the_tenant_and_its_salt(keys: ApiKeys, own: str | None) -> None:
    generator = ScriptedGenerator()
    records: list[Any] = []
    client = client_of(Door(keys=keys), generator, on_end=records.append)
    for key in (ALICE, BOB, ALICE):
        body = {"model": "tiny", "prompt": ["a", "b"]} | ({"cache_salt": own} if own else {})
        headers = {"authorization": f"Bearer {key}"}
        assert (await client.send("POST", "/v1/completions", body, headers)).status == 200
    assert [r.tenant for r in generator.requests] == ["alice"] * 2 + ["bob"] * 2 + ["alice"] * 2
    assert [r.tenant for r in records] == ["alice", "bob", "alice"]
    alice, _, bob, *_, again = [r.cache_salt for r in generator.requests]
    assert alice == again
    assert (alice == bob) == (own is not None)
    assert own is None or alice == own


async def test_a_tenant_without_keys_has_no_salt() -> None:
    generator = ScriptedGenerator()
    await client_of(Door(), generator).complete()
    assert (generator.requests[0].tenant, generator.requests[0].cache_salt) == (None, "")


async def test_too_many_at_once_429(keys: ApiKeys) -> None:
    generator = ScriptedGenerator(hang=True)
    refused: list[str] = []
    door = Door(keys=keys, max_inflight=3, max_inflight_per_key=2, on_refused=refused.append)
    waiting, asking = client_of(door, generator), []

    def one_more(key: str) -> None:
        asking.append(asyncio.ensure_future(send(waiting, "POST", "/v1/completions", key)))

    one_more(ALICE)
    one_more(ALICE)
    await until(lambda: len(generator.requests) == 2, 5)
    client = client_of(door)
    reply = await send(client, "POST", "/v1/completions", ALICE)
    assert (reply.status, reply.json["error"]["code"]) == (429, "overloaded")
    assert int(reply.headers["retry-after"]) >= 1
    assert (await send(client, "POST", "/v1/completions", BOB)).status == 200
    one_more(BOB)
    await until(lambda: len(generator.requests) == 3, 5)
    assert (await send(client, "POST", "/v1/completions", BOB)).status == 429
    assert (await send(client, "GET", "/v1/models", BOB)).status == 200
    assert refused == ["key_inflight", "inflight"]
    waiting.leave.set()
    await asyncio.gather(*asking)
    assert (await send(client, "POST", "/v1/completions", ALICE)).status == 200
    assert (door._inside, door._inside_by_tenant) == (0, {})


@pytest.mark.parametrize(
    "headers",
    [
        {f"x-{n}": "1" for n in range(door_module.MAX_HEADERS + 1)},
        {"x": "y" * door_module.MAX_HEADER_BYTES},
    ],
    ids=["many", "long"],
)
async def test_too_many_headers_431(headers: dict[str, str]) -> None:
    reply = await make_client().send("GET", "/health", headers=headers)
    assert (reply.status, reply.json["error"]["code"]) == (431, "headers_too_large")
    assert len(reply.body) < 1000


async def test_a_body_that_drips_408() -> None:
    """Each part resets nothing: the whole body has one deadline, and others are answered meanwhile."""
    refused: list[str] = []
    door = Door(bodies=BodyLimits(body_s=0.2), on_refused=refused.append)
    client = client_of(door)
    messages: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def note(message: Any) -> None:
        messages.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    dripping = asyncio.ensure_future(client.api(scope, receive, note))
    assert (await client.complete()).status == 200
    await asyncio.wait_for(dripping, 10)
    assert messages[0]["status"] == 408
    assert (b"connection", b"close") in messages[0]["headers"]
    assert b"body_timeout" in messages[1]["body"]
    assert refused == ["body_timeout"]
    assert door._inside == 0


async def test_a_client_that_leaves_while_it_sends_frees_its_place() -> None:
    door = Door(max_inflight=1)
    client = client_of(door)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def nothing(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await client.api(scope, receive, nothing)
    assert (await client.complete()).status == 200


@pytest.mark.parametrize("value", ["", "x", "-5", "9" * 5000, "²", "0x10"])
async def test_a_content_length_of_any_kind_is_no_fault_of_ours(value: str) -> None:
    reply = await send(make_client(), "POST", "/v1/completions", **{"content-length": value})
    assert reply.status in (200, 400, 413)


async def test_behind_a_server_that_echoes_the_id_it_is_said_once() -> None:
    client = make_client(id_is_echoed=True)
    given = await client.send("GET", "/health", headers={"x-request-id": "abc"})
    assert "x-request-id" not in given.headers
    for headers in ({}, {"x-request-id": "not one of ours"}):
        reply = await client.send("GET", "/health", headers=headers)
        assert len(reply.headers["x-request-id"]) == 32


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_links_bind_an_address_and_not_all(host: str) -> None:
    model = {"name": "m", "variants": [{"weights": "w"}]}
    with pytest.raises(ConfigError, match=r"link\.host"):
        load_config({"models": [model], "link": {"host": host}})
