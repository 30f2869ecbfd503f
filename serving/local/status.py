"""What a deployment looks like while it starts, and the one line that says why it failed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Status:
    """`state`: deploying | running | failed; `deployments`: `application/deployment` -> Serve's status."""

    state: str
    message: str = ""
    deployments: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, report: dict[str, Any]) -> Status:
        """From one line of `serving.local.deploy`."""
        messages = [report.get("message", "")]
        deployments = {}
        for app_name, app in report["applications"].items():
            if app["status"] == "DEPLOY_FAILED":
                messages.append(app["message"])
            for name, deployment in app["deployments"].items():
                deployments[f"{app_name}/{name}"] = deployment["status"]
                if deployment["status"] in ("DEPLOY_FAILED", "UNHEALTHY"):
                    messages.append(deployment["message"])
        return cls(report["state"], "\n".join(filter(None, messages)), deployments)

    @property
    def summary(self) -> str:
        """What is being waited for, short."""
        waiting = [name for name, status in self.deployments.items() if status != "HEALTHY"]
        if len({name.partition("/")[0] for name in self.deployments}) == 1:
            waiting = [name.partition("/")[2] for name in waiting]
        if not self.deployments:
            return "building the application"
        return ", ".join(waiting) if waiting else "the first answer"


# `serving.errors.ConfigError: text`, `ValueError: text`: the last line of a traceback.
_RAISED = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*(?P<kind>[A-Z]\w*(?:Error|Exception|Failure|Timeout)): (?P<text>\S.*)$"
)
# Of HAProxy, whose exception begins with notices that mean nothing.
_CANNOT_BIND = re.compile(r"\[ALERT\].*(?P<text>cannot bind socket .*\])")
# pydantic's, of Serve's own schema: the setting and what is wrong with it are the next two lines.
_VALIDATION = re.compile(r"\d+ validation errors? for \w+$")
_NO_CAUSE = "For further information visit"
_OURS = ("ConfigError", "StartError", "LayoutMismatch")


def failure_line(message: str, *, only_raised: bool = False) -> str:
    """The exception at the root of what Serve says, without its traceback.

    Ray and Serve wrap an exception by quoting its traceback, so the root stands last. Without any
    exception: the last line, or with `only_raised` "".
    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(_NO_CAUSE)]
    if (alert := _CANNOT_BIND.search(message)) is not None:
        return f"HAProxy {alert['text']}"
    for line, setting, problem in zip(lines, lines[1:], lines[2:], strict=False):
        if _VALIDATION.search(line):
            return f"{setting}: {problem.partition(' [type=')[0]}"
    raised = [found for line in lines if (found := _RAISED.match(line))]
    raised = [found for found in raised if not found["text"].startswith("Traceback")]
    for found in reversed(raised):
        if found["kind"] in _OURS:
            return found["text"]
    if raised:
        return f"{raised[-1]['kind']}: {raised[-1]['text']}"
    return lines[-1] if lines and not only_raised else ""
