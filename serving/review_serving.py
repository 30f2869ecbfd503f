"""`check`: what around the models cannot work: the application itself, key files, the planner's terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from serving.config import AppConfig
from serving.config_review import Finding, Level
from serving.errors import ConfigError
from serving.live_settings import LivePlanner
from serving.planner_settings import planner_settings
from serving.preflight import IMPORT_PATH, Plan


def serving_findings(plan: Plan) -> Iterator[Finding]:
    """Of the file as a whole, then of each of our applications."""
    if not plan.applications:
        yield Finding(
            Level.ERROR,
            "applications",
            f"none is KVRelay's: no import_path is {IMPORT_PATH}",
            f"import_path: {IMPORT_PATH}",
        )
    for document, application in zip(_ours(plan), plan.applications, strict=False):
        prefix = document.get("route_prefix", "/")
        if not str(prefix).startswith("/"):
            yield Finding(
                Level.ERROR,
                "route_prefix",
                f"{prefix!r} does not begin with a slash",
                "route_prefix: /",
            )
        if application.planner.mode == "act" and document.get("external_scaler_enabled") is not True:
            yield Finding(
                Level.ERROR,
                "external_scaler_enabled",
                "is not true, so Serve refuses what the planner orders",
                "external_scaler_enabled: true",
            )
        yield from _planner(application)
        yield from _files(application)


def _ours(plan: Plan) -> list[Mapping[str, Any]]:
    applications = plan.document.get("applications", [])
    return [one for one in applications if one.get("import_path") == IMPORT_PATH]


def _planner(application: AppConfig) -> Iterator[Finding]:
    try:
        planner_settings(application, LivePlanner())
    except ConfigError as error:
        yield Finding(
            Level.ERROR,
            "planner.budget",
            error.message.removeprefix("planner.budget = "),
            "raise it, or lower min_replicas",
        )


def _files(application: AppConfig) -> Iterator[Finding]:
    """They belong on the nodes, not here; but a path that is not absolute names another file on each."""
    files = {
        "security.admin_key_file": application.security.admin_key_file,
        "security.api_keys_file": application.security.api_keys_file,
        "link.key_file": application.link.key_file,
    }
    for model in application.models:
        for variant in model.variants:
            files[f"{model.name}/{variant.name} times"] = variant.times
    for setting, name in files.items():
        if name is not None and not Path(name).is_file():
            yield Finding(
                Level.NOTE,
                setting,
                f"{name} is not on this machine",
                "it has to be where the application runs, before it starts",
            )
