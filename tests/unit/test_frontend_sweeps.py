"""A frontend's two sweeps: one that fails neither stops the other nor fills the log."""

from __future__ import annotations

import pytest

from serving import frontend_host
from serving.log_limit import BURST
from tests.unit.app_rig import LONG_S, App
from tests.unit.handoff_fakes import until


@pytest.mark.parametrize("fails", ["coordinator", "links"])
async def test_a_sweep_that_fails_leaves_the_other_alone(
    fails: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(frontend_host, "SWEEP_S", 0.01)
    swept = {"coordinator": 0, "links": 0}

    def sweep(name: str) -> None:
        swept[name] += 1
        if name == fails:
            raise RuntimeError("a run that cannot be swept")

    async with App() as app:
        links = app.frontends[0].variants["tiny", "main"]
        with monkeypatch.context() as patched:
            patched.setattr(links.coordinator, "sweep", lambda: sweep("coordinator"))
            patched.setattr(links, "sweep", lambda: sweep("links"))
            await until(lambda: min(swept.values()) > 3 * BURST, LONG_S)
    failures = [record for record in caplog.records if "a sweep of tiny/main failed" in record.message]
    assert len(failures) == BURST
