"""LeaseTable: time is a parameter, so every case is a few lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.base import AttemptId
from serving.kv.lease import LeaseEnd, LeaseTable, pack_note, unpack_note

A, B = AttemptId(1), AttemptId(2)


def generation_of(table: LeaseTable, attempt: AttemptId, now_s: float, duration_s: float) -> int:
    lease = table.grant(attempt, now_s, duration_s)
    assert lease is not None
    return lease.generation


def test_confirm_ends_a_whole_lease() -> None:
    table = LeaseTable()
    generation = generation_of(table, A, 0, 10)
    assert table.confirm(A, generation, 9.9)
    assert A not in table
    assert table.ended(A) is LeaseEnd.CONFIRMED


def test_confirm_is_idempotent() -> None:
    table = LeaseTable()
    generation = generation_of(table, A, 0, 10)
    assert table.confirm(A, generation, 1)
    assert table.confirm(A, generation, 100)
    assert not table.confirm(A, generation + 1, 100)


@pytest.mark.parametrize("verb", ["renew", "confirm", "grant"])
def test_nothing_revives_an_expired_lease(verb: str) -> None:
    table = LeaseTable()
    generation = generation_of(table, A, 0, 10)
    if verb == "renew":
        assert not table.renew(A, generation, 10, 10)
    elif verb == "confirm":
        assert not table.confirm(A, generation, 10)
    else:
        assert table.grant(A, 10, 10) is None
    assert table.expire(10) == [A]  # told once, though a verb found it first
    assert table.expire(11) == []


def test_renewals_and_further_grants_prolong_one_generation() -> None:
    table = LeaseTable()
    generation = generation_of(table, A, 0, 10)
    assert generation_of(table, A, 5, 10) == generation
    assert table.renew(A, generation, 14, 10)
    assert table.expire(23.9) == []
    assert table.expire(24) == [A]


def test_a_shorter_grant_never_shortens() -> None:
    table = LeaseTable()
    generation = generation_of(table, A, 0, 100)
    generation_of(table, A, 1, 5)
    assert table.confirm(A, generation, 50)


def test_wrong_generation_is_refused_and_changes_nothing() -> None:
    table = LeaseTable()
    generation = generation_of(table, A, 0, 10)
    assert not table.renew(A, generation + 1, 1, 100)
    assert not table.confirm(A, generation + 1, 1)
    assert table.expire(10) == [A]


def test_release_is_idempotent_and_final() -> None:
    table = LeaseTable()
    generation = generation_of(table, A, 0, 10)
    assert table.release(A)
    assert not table.release(A)
    assert not table.confirm(A, generation, 1)
    assert table.expire(100) == []


def test_late_free_of_old_attempt() -> None:
    table = LeaseTable()
    generation_of(table, A, 0, 10)
    assert table.release(A)
    generation = generation_of(table, B, 0, 10)
    table.release(A)
    assert table.confirm(B, generation, 1)


def test_memory_of_ended_leases_is_bounded() -> None:
    table = LeaseTable(remember=3)
    for attempt in range(10):
        generation_of(table, AttemptId(attempt), 0, 1)
        table.release(AttemptId(attempt))
    assert [table.ended(AttemptId(a)) for a in (6, 7)] == [None, LeaseEnd.RELEASED]


def test_notes() -> None:
    assert unpack_note(pack_note(A, 7)) == (A, 7)
    assert unpack_note(b"") is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["grant", "renew", "confirm", "release", "expire"]),
            st.integers(0, 2),
            st.floats(0, 3),
        ),
        max_size=40,
    )
)
def test_each_lease_ends_exactly_once(steps: list[tuple[str, int, float]]) -> None:
    table, now_s = LeaseTable(), 0.0
    granted: dict[AttemptId, int] = {}
    ends: list[AttemptId] = []
    for verb, number, wait_s in steps:
        now_s += wait_s
        attempt = AttemptId(number)
        live = attempt in table
        if verb == "grant":
            lease = table.grant(attempt, now_s, 2)
            if lease is not None:
                assert granted.setdefault(attempt, lease.generation) == lease.generation
        elif verb == "renew":
            table.renew(attempt, granted.get(attempt, 0), now_s, 2)
        elif verb == "confirm":
            if table.confirm(attempt, granted.get(attempt, 0), now_s) and live:
                ends.append(attempt)
        elif verb == "release":
            ends += [attempt] if table.release(attempt) else []
        else:
            ends += table.expire(now_s)
    ends += table.expire(now_s + 10)
    assert sorted(ends) == sorted(granted)
    assert len(table) == 0
