"""`check`: what around the models cannot work: the application itself, key files, the planner's terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from serving.api_keys import ApiKeys
from serving.config import AppConfig
from serving.config_review import Finding, Level
from serving.errors import ConfigError
from serving.link_key import read_key
from serving.live_settings import LivePlanner
from serving.planner_settings import planner_settings
from serving.preflight import IMPORT_PATH, Plan

# Raise ConfigError for a file that is there and cannot be used.
KEY_READERS: dict[str, Callable[[str, str], object]] = {
    "security.admin_key_file": read_key,
    "security.api_keys_file": lambda name, setting: ApiKeys(name),
    "link.key_file": read_key,
}


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
        if application.planner.mode == "act" and document.get("external_scaler_enabled") is not True:
            yield Finding(
                Level.ERROR,
                "external_scaler_enabled",
                "is not true, so Serve refuses what the planner orders",
                "external_scaler_enabled: true",
            )
        yield from _planner(application)
        yield from _bodies(application)
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


def _bodies(application: AppConfig) -> Iterator[Finding]:
    """A body that is allowed has to fit into what unfinished ones may hold; a key's share is a share."""
    frontend, keys = application.frontend, application.security.api_keys_file is not None
    shares = {"unread_bytes": frontend.unread_bytes}
    if keys and frontend.unread_bytes_per_key is not None:
        shares["unread_bytes_per_key"] = frontend.unread_bytes_per_key
    for name, most in shares.items():
        if frontend.body_limit_bytes > most:
            yield Finding(
                Level.ERROR,
                f"frontend.{name}",
                f"{most:,} bytes; a body may have {frontend.body_limit_bytes:,} and would never be read",
                f"at least body_limit_bytes ({frontend.body_limit_bytes})",
            )
    for name in ("max_slow_bodies", "unread_bytes", "max_inflight"):
        most, share = getattr(frontend, name), getattr(frontend, f"{name}_per_key")
        if keys and share is not None and share > most:
            yield Finding(
                Level.WARNING,
                f"frontend.{name}_per_key",
                f"{share:,} of one key; all together may have {most:,}: one key can take all of it",
                f"below {name}",
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
        elif name is not None and setting in KEY_READERS:
            try:
                KEY_READERS[setting](name, setting)
            except ConfigError as error:
                yield Finding(Level.ERROR, setting, error.message, "a key of at least 16 bytes")
