"""serving.engine.scheduler: cancelled in every state, or failed all at once; nothing stays held."""

from __future__ import annotations

import pytest

from serving.engine.base import AttemptId
from tests.engine_rig import DECODE, LOCAL, PREFILL, Rig, continuation, prompt, work


def _waiting(rig: Rig) -> None:
    rig.submit(work(8, prompt(200)), work(1, prompt(300, salt=1)))
    rig.step()
    assert 1 not in rig.told.started


def _prefill(rig: Rig) -> None:
    rig.submit(work(1, prompt(200)))
    rig.step()


def _prefill_announced(rig: Rig) -> None:
    rig.submit(work(1, prompt(200), PREFILL))
    rig.step()
    assert rig.told.chunks[1]


def _decode(rig: Rig) -> None:
    rig.submit(work(1, prompt(20), max_tokens=50))
    for _ in range(5):
        rig.step()


def _leased(rig: Rig) -> None:
    rig.submit(work(1, prompt(20), PREFILL))
    rig.run()
    assert rig.pool.is_leased(AttemptId(1))


def _reserved(rig: Rig) -> None:
    rig.submit(work(1, prompt(20), DECODE))
    rig.run()


def _transferred(rig: Rig) -> None:
    """The KV is here and all places in the batch are taken."""
    rig.submit(*(work(10 + i, prompt(5, salt=i), max_tokens=50) for i in range(4)))
    rig.step()
    rig.submit(work(1, prompt(20), DECODE))
    rig.step()
    rig.scheduler.kv_arrived(AttemptId(1), 5)
    rig.step()
    assert rig.scheduler.load().waiting == 1


def _retracted(rig: Rig) -> None:
    rig.submit(work(10, prompt(100), max_tokens=200), work(1, prompt(180, salt=1), max_tokens=200))
    while not rig.counters.preemptions:
        rig.step()
    assert rig.scheduler.load().waiting == 1


STATES = [
    pytest.param(_waiting, id="waiting"),
    pytest.param(_prefill, id="prefill"),
    pytest.param(_prefill_announced, id="prefill_announced"),
    pytest.param(_decode, id="decode"),
    pytest.param(_leased, id="leased"),
    pytest.param(_reserved, id="reserved"),
    pytest.param(_transferred, id="queued_transferred_abort"),
    pytest.param(_retracted, id="retracted_abort_host_memory"),
]


@pytest.mark.parametrize("quarantine", [False, True])
@pytest.mark.parametrize("reach", STATES)
def test_abort_in_every_state_frees(reach: object, quarantine: bool) -> None:
    rig = Rig(n_blocks=40, block_tokens=8, max_batch=4)
    reach(rig)  # type: ignore[operator]
    n_told = len(rig.told.tokens.get(1, []))
    for _ in range(2):
        rig.scheduler.cancel(AttemptId(1), quarantine)
    rig.run()
    assert len(rig.told.tokens.get(1, [])) == n_told
    assert 1 not in rig.told.finished
    assert 1 not in rig.told.failed
    rig.scheduler.pool.end_quarantine(AttemptId(1))
    rig.assert_idle()


def test_quarantine_parks_what_a_read_may_still_write() -> None:
    rig = Rig(n_blocks=8)
    rig.submit(work(1, prompt(20)))
    rig.run()
    rig.submit(work(2, prompt(33), DECODE))
    rig.run()
    assert rig.told.reserved[2].n_cached == 2
    rig.scheduler.cancel(AttemptId(2), quarantine=True)
    assert rig.pool.states().quarantined == 3
    rig.submit(work(3, prompt(40, salt=5)))
    rig.run()
    assert 3 not in rig.told.started  # 6 blocks wanted, 5 left
    rig.pool.end_quarantine(AttemptId(2))
    rig.run()
    assert rig.told.tokens[3] == continuation(prompt(40, salt=5), 4)
    rig.assert_idle()


def test_fail_all_tells_every_live_attempt() -> None:
    rig = Rig(max_batch=2)
    rig.submit(work(9, prompt(9), PREFILL))
    rig.run()
    modes = (LOCAL, PREFILL, DECODE, LOCAL)
    rig.submit(*(work(i, prompt(20 + i * 90, salt=i), mode) for i, mode in enumerate(modes)))
    rig.step()
    rig.scheduler.fail_all("gone")
    rig.step()
    assert set(rig.told.failed) == {0, 1, 2, 3}
    assert rig.pool.states().leased == 2  # a reader may still be at it
    assert rig.pool.states().quarantined == 26  # a read may still write to them
    rig.scheduler.release(AttemptId(9))
    rig.pool.end_quarantine(AttemptId(2))
    rig.assert_idle()
