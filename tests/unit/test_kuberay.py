"""configs/kuberay/rayservice.yaml: what KubeRay accepts, with the environment and application we want."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

import configs
from serving.config import load_config
from serving.local.environment import network_environment, node_environment
from serving.local.leave import is_ray_start
from serving.preflight import read_plan

SHIPPED = Path(configs.__file__).parent
SCHEMA = json.loads((Path(__file__).parents[1] / "golden" / "rayservice.schema.json").read_text())
MULTI_NODE = read_plan(SHIPPED / "multi-node.yaml")
Document = dict[str, Any]


@pytest.fixture(scope="module")
def service() -> Document:
    document: Document = yaml.safe_load((SHIPPED / "kuberay" / "rayservice.yaml").read_text())
    return document


def pods(service: Document) -> dict[str, Document]:
    """Group -> pod spec."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = {"head": cluster["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    return {name: group["template"]["spec"] for name, group in groups.items()}


def environment(pod: Document) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"]}


def test_kuberay_accepts_it(service: Document) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(service, SCHEMA)


def _drop_template(service: Document) -> None:
    del service["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]


def _misspell(service: Document) -> None:
    service["spec"]["rayClusterConfig"]["enableAutoscaling"] = True


def _number_in_the_environment(service: Document) -> None:
    pods(service)["head"]["containers"][0]["env"][0]["value"] = 1


def _odd_quantity(service: Document) -> None:
    pods(service)["prefill"]["volumes"][0]["emptyDir"]["sizeLimit"] = "4 GB"


@pytest.mark.parametrize(
    "spoil",
    [_drop_template, _misspell, _number_in_the_environment, _odd_quantity],
    ids=lambda f: f.__name__,
)
def test_the_schema_can_refuse(service: Document, spoil: Callable[[Document], None]) -> None:
    spoilt = copy.deepcopy(service)
    spoil(spoilt)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(spoilt, SCHEMA)


def test_it_deploys_what_multi_node_yaml_deploys(service: Document) -> None:
    deployed = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert deployed == MULTI_NODE.document
    load_config(deployed["applications"][0]["args"])


def test_every_pod_has_the_environment_of_kvrelay_env(service: Document) -> None:
    longest_s = MULTI_NODE.longest_request_s
    wanted = {**node_environment(longest_s), **network_environment(longest_s)}
    for name, pod in pods(service).items():
        assert wanted.items() <= environment(pod).items(), name


def test_every_pool_has_a_group_with_its_label(service: Document) -> None:
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    labels = {group["groupName"]: group["labels"] for group in groups}
    (config,) = MULTI_NODE.applications
    wanted = [pool.labels for _, pool in MULTI_NODE.pools()] + [config.frontend.labels]
    assert all(label in labels.values() for label in wanted)
    for name, pool in MULTI_NODE.pools():
        (group,) = [group for group in groups if group["labels"] == pool.labels]
        assert (group["minReplicas"], group["maxReplicas"]) == (pool.min_replicas, pool.max_replicas), name
        cpus = float(group["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"])
        assert cpus >= pool.cpus, "a pod must hold a worker"


def test_drain_windows_contain_each_other(service: Document) -> None:
    """Longest stream < the replica's window < its node's < its pod's; the old cluster waits as long."""
    (config,) = MULTI_NODE.applications
    replica_s = config.deadlines.request_ms / 1e3 + 5  # graceful_shutdown_timeout_s of every deployment
    for name, pod in pods(service).items():
        node_s = float(environment(pod)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        if name != "head":
            assert replica_s < node_s < pod["terminationGracePeriodSeconds"], name
            assert (
                pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1] == "serving.local.leave"
            )
        assert replica_s < service["spec"]["rayClusterDeletionDelaySeconds"]


def test_every_pod_has_shared_memory_of_its_own_size(service: Document) -> None:
    """A container's default is 64 MiB, less than Ray's object store and an engine's processes need."""
    for name, pod in pods(service).items():
        assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"], name
        (volume,) = pod["volumes"]
        assert volume["emptyDir"]["medium"] == "Memory"


COMMANDS = {
    "the console script": (["/opt/bin/python3.11", "/opt/bin/ray", "start", "--head", "--block"], True),
    "the module": (["python", "-m", "ray.scripts.scripts", "start", "--block"], True),
    "a shell around it": (["/bin/bash", "-c", "ulimit -n 65536; ray start --block"], False),
    "an init around it": (["sh", "-c", "x", "init", "a", "python", "ray", "start", "--block"], False),
    "another command": (["python", "/opt/bin/ray", "status"], False),
    "without block": (["python", "/opt/bin/ray", "start", "--head"], False),
    "a kernel thread": ([], False),
}


@pytest.mark.parametrize(("command", "expected"), COMMANDS.values(), ids=COMMANDS)
def test_leave_knows_ray_start(command: list[str], expected: bool) -> None:
    assert is_ray_start(command) is expected
