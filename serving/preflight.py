"""What can be known to be wrong before anything is started: settings, port, CPUs, GPUs, weights.

Every check raises ConfigError or StartError with one line; none changes anything but `prepare_weights`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import psutil
import yaml

from serving.config import AppConfig, PoolConfig, load_config
from serving.errors import ConfigError, StartError
from serving.local.environment import owner_of
from serving.local.ports import is_free
from serving.serve_keys import check_keys, check_values
from serving.yaml_file import load_yaml

IMPORT_PATH = "serving.app:build"
DEFAULT_REQUEST_S = 600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A `serve run` file that was read and found right."""

    path: Path
    document: Mapping[str, Any]
    applications: tuple[AppConfig, ...]  # those that are KVRelay's; others are Serve's own business

    @property
    def host(self) -> str:
        return str(self._http.get("host", "0.0.0.0"))

    @property
    def port(self) -> int:
        return int(self._http.get("port", 8000))

    @property
    def route_prefix(self) -> str:
        """What comes before the API's paths: "", or "/llm"; of our first application."""
        ours = [one for one in self.document["applications"] if one["import_path"] == IMPORT_PATH]
        prefix = ours[0].get("route_prefix") if ours else None
        return str(prefix or "/").rstrip("/")

    @property
    def _http(self) -> Mapping[str, Any]:
        return self.document.get("http_options") or {}

    @property
    def model_names(self) -> list[str]:
        return [model.name for application in self.applications for model in application.models]

    @property
    def longest_request_s(self) -> float:
        return max(
            (app.deadlines.request_ms / 1000 for app in self.applications), default=DEFAULT_REQUEST_S
        )

    def labels(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Whatever asks for nodes with labels."""
        for application in self.applications:
            if application.frontend.labels:
                yield "frontend", application.frontend.labels
        for name, pool in self.pools():
            if pool.labels:
                yield name, pool.labels

    def pools(self) -> Iterator[tuple[str, PoolConfig]]:
        """Every pool with a name a person can find in the file."""
        for application in self.applications:
            for model in application.models:
                for variant in model.variants:
                    yield f"{model.name}/{variant.name} prefill", variant.prefill
                    yield f"{model.name}/{variant.name} decode", variant.decode


def find_config(name: str) -> Path:
    """`name` as a path, or one of the shipped configurations (`quickstart`, `configs/quickstart.yaml`)."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = Path(str(resources.files("configs")))
    for candidate in (path.name, f"{path.name}.yaml"):
        if (shipped / candidate).is_file() and path.parent.name in ("", "configs"):
            return shipped / candidate
    known = ", ".join(sorted(file.stem for file in shipped.glob("*.yaml")))
    if path.is_dir():
        raise ConfigError(f"{name}: is a directory; give a configuration file")
    raise ConfigError(f"{name}: no such file; shipped configurations: {known}")


def read_plan(path: Path) -> Plan:
    """Raises ConfigError for a file that is no valid configuration of `serve run`."""
    try:
        document = load_yaml(path.read_text())
    except yaml.YAMLError as error:
        where = (
            f":{error.problem_mark.line + 1}"
            if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark
            else ""
        )
        what = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
        raise ConfigError(f"{path}{where}: not YAML: {what}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("applications"), list):
        raise ConfigError(
            f"{path}: a configuration of `serve run` has a list `applications`; this has none"
        )
    try:
        check_keys(document)
        check_values(document)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}") from None
    applications = []
    for index, application in enumerate(document["applications"]):
        if not isinstance(application, dict) or not isinstance(application.get("import_path"), str):
            raise ConfigError(
                f"{path}: applications[{index}].import_path is missing; expected {IMPORT_PATH}"
            )
        if application["import_path"] == IMPORT_PATH:
            try:
                applications.append(load_config(application.get("args") or {}))
            except ConfigError as error:
                raise ConfigError(f"{path}: {error.message}") from None
    plan = Plan(path, document, tuple(applications))
    _check_http(plan)
    return plan


def _check_http(plan: Plan) -> None:
    http = plan.document.get("http_options") or {}
    if not isinstance(http, dict):
        raise ConfigError(f"{plan.path}: http_options = {http!r}; allowed: a mapping with host and port")
    port = http.get("port", 8000)
    if not isinstance(port, int) or not 0 < port < 65536:
        raise ConfigError(f"{plan.path}: http_options.port = {port!r}; allowed: 1 to 65535")


def check_port(host: str, port: int) -> None:
    try:
        socket.getaddrinfo(host, port)
    except OSError:
        raise ConfigError(
            f"host {host!r}: no such address; choose one of this machine with --host"
        ) from None
    if is_free(port, "" if host == "0.0.0.0" else host):
        return
    holder = _listener(port)
    if holder is None:
        raise StartError(
            f"port {port} of {host} cannot be used: it is taken, or {host} is not this machine's; "
            "choose others with --port, --host"
        )
    owner = owner_of(holder.pid)
    if owner is not None:
        raise StartError(
            f"port {port} is served by another `kvrelay serve` (pid {owner}); stop it, or use --port"
        )
    raise StartError(
        f"port {port} is in use by {holder.name()} (pid {holder.pid}); choose another with --port"
    )


def _listener(port: int) -> psutil.Process | None:
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,)
            if listens and connection.pid is not None:
                return psutil.Process(connection.pid)
    return None


def check_files(plan: Plan) -> None:
    """Keys and profiles that are not there: workers and frontends would find that out when they start."""
    from serving.api_keys import ApiKeys
    from serving.link_key import read_key

    for application in plan.applications:
        security = application.security
        if security.admin_key_file is not None:
            read_key(security.admin_key_file, "security.admin_key_file")
        if security.api_keys_file is not None:
            ApiKeys(security.api_keys_file)
        if application.link.key_file is not None:
            read_key(application.link.key_file, "link.key_file")
        if any(variant.times for model in application.models for variant in model.variants):
            from planner.timing_profile import load_profiles

            load_profiles(application)


def check_resources(plan: Plan, cpus: float) -> None:
    """The replicas that start must fit on this machine: a pool that does not would wait for ever."""
    for name, labels in plan.labels():
        raise StartError(
            f"{name}: labels = {labels}; one machine has no labels: deploy {plan.path.name} on a cluster"
        )
    _check_one(plan, "CPUs", cpus, lambda pool: pool.cpus, "cpus")
    _check_one(plan, "GPUs", len(list(Path("/dev").glob("nvidia[0-9]*"))), lambda pool: pool.gpus, "gpus")


def _check_one(
    plan: Plan, what: str, available: float, share: Callable[[PoolConfig], float], setting: str
) -> None:
    needed = sum(pool.replicas * share(pool) for _, pool in plan.pools())
    if needed <= available + 1e-9:
        return
    parts = [
        f"{name} {pool.replicas} x {share(pool):g}"
        for name, pool in plan.pools()
        if pool.replicas * share(pool) > 0
    ]
    raise StartError(
        f"{what}: the pools need {needed:g} ({', '.join(parts)}) and there are {available:g}; "
        f"lower `replicas` or `{setting}` in {plan.path}"
    )


def prepare_weights(plan: Plan) -> None:
    """Make every model's files ready on this machine; the first time of a known model takes seconds."""
    from serving.manifest import resolve_weights

    for application in plan.applications:
        for model in application.models:
            for variant in model.variants:
                if variant.engine.kind != "tensorrt_llm":
                    resolve_weights(variant.weights)
