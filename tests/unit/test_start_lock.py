"""Two starts on one port: the second hears so before it starts anything."""

from __future__ import annotations

import os

import pytest

from serving import cli
from serving.errors import StartError
from serving.local.start_lock import StartLock

PORT = 65_531  # nothing is bound to it: the lock is no port


def test_one_start_at_a_time_on_a_port() -> None:
    lock = StartLock("127.0.0.1", PORT)
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(StartError) as caught:
            StartLock(host, PORT)
        assert (
            f"port {PORT} is served by another `kvrelay serve` (pid {os.getpid()}), running or starting"
            in caught.value.message
        )
    for other in (StartLock("127.0.0.1", PORT - 1), StartLock("127.0.0.2", PORT)):
        other.release()
    lock.release()
    lock.release()
    StartLock("127.0.0.1", PORT).release()


def test_a_second_start_ends_before_it_starts_anything(capsys: pytest.CaptureFixture[str]) -> None:
    lock = StartLock("127.0.0.1", PORT)
    try:
        assert cli.main(["serve", "sim", "--port", str(PORT), "--cpus", "9"]) == 1
    finally:
        lock.release()
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert f"port {PORT} is served by another `kvrelay serve` (pid {os.getpid()})" in said.err
