"""The environment of a cluster on this machine: what its processes inherit, what of the user's stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.local.environment import MARKER, admin_key_file, closing_directory, cluster_environment
from serving.local.ports import PortBlock


@pytest.fixture
def ports() -> Iterator[PortBlock]:
    block = PortBlock()
    yield block
    block.release()


def environment(ports: PortBlock, **extra: str) -> dict[str, str]:
    return cluster_environment(
        "1-x", Path("/tmp/kvr"), ports, flags=True, longest_request_s=600, extra=extra
    )


def test_ucx_listens_on_loopback_alone_unless_told(
    ports: PortBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert environment(ports)["UCX_NET_DEVICES"] == "lo"
    assert environment(ports, UCX_NET_DEVICES="eth1")["UCX_NET_DEVICES"] == "eth1"
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    assert environment(ports)["UCX_NET_DEVICES"] == "mlx5_0:1"


def test_frontends_find_where_to_listen_for_the_order_to_close(
    ports: PortBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert closing_directory() is None
    for name, value in environment(ports).items():
        monkeypatch.setenv(name, value)
    assert closing_directory() == Path("/tmp/kvr/closing")
    assert environment(ports)[MARKER] == "1-x"


def test_an_empty_name_of_a_key_file_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVRELAY_ADMIN_KEY_FILE", "")
    assert admin_key_file() is None
