"""What configs/multi-node.yaml, `kvrelay env` and `kvrelay serve` say of several machines fits together."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import configs
from serving.cli import main
from serving.errors import StartError
from serving.local.environment import host_environment, network_environment, node_environment
from serving.preflight import check_resources, read_plan

PLAN = read_plan(Path(configs.__file__).parent / "multi-node.yaml")


def test_every_part_has_nodes_of_its_own() -> None:
    labels = [label for _, label in PLAN.labels()]
    assert labels == [{"pool": "frontend"}, {"pool": "prefill"}, {"pool": "decode"}]
    (config,) = PLAN.applications
    assert config.frontend.max_per_node == 1 < config.frontend.replicas


def test_one_machine_refuses_labels() -> None:
    with pytest.raises(StartError, match=r"frontend: labels = .* on a cluster"):
        check_resources(PLAN, cpus=100)


def test_proxies_reach_frontends_of_other_nodes() -> None:
    assert PLAN.host == "0.0.0.0"
    assert PLAN.document["proxy_location"] == "EveryNode"


@pytest.mark.parametrize("longest_s", [1.0, 600.0, 7200.0])
def test_windows_contain_each_other(longest_s: float) -> None:
    """A replica leaves within the longest request + 5 s, its node later, and HAProxy outwaits both."""
    node = node_environment(longest_s) | network_environment(longest_s)
    assert float(node["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) > longest_s + 5
    assert float(node["RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S"]) > longest_s
    hard_stop_s = float(node["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])
    assert float(node["RAY_SERVE_PORT_QUARANTINE_S"]) > hard_stop_s >= longest_s


def test_a_silent_node_is_found_within_ten_seconds_and_not_within_five() -> None:
    env = {name: float(value) for name, value in network_environment(600).items() if "health" in name}
    period_s = env["RAY_health_check_period_ms"] / 1e3
    timeout_s = env["RAY_health_check_timeout_ms"] / 1e3
    failures = env["RAY_health_check_failure_threshold"]
    assert 5 < failures * (period_s + timeout_s) <= 10


def test_env_prints_both_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "multi-node"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    printed = dict(assignment.split("=", 1) for export, assignment in lines if export == "export")
    assert printed == {**node_environment(600), **network_environment(600)}


def test_hosts_of_one_machine_cannot_hand_kv_over_through_memory(tmp_path: Path) -> None:
    env = host_environment(tmp_path, "a", 600)
    assert set(env["UCX_TLS"].split(",")) - {"cuda_copy"} == {"tcp", "self"}
    assert env["TMPDIR"] != host_environment(tmp_path, "b", 600)["TMPDIR"]
