"""The one line that says why a deployment failed, out of what Ray, Serve and HAProxy say around it."""

from __future__ import annotations

import pytest

from serving.local.status import failure_line

WRAPPED = """
ray.exceptions.RayTaskError(RuntimeError): ray::Actor.ready() (pid=1)
  File "x.py", line 1
RuntimeError: The deployment failed to start, see: Traceback (most recent call last):
serving.errors.ConfigError: engine.threads = 0; allowed: 1 or more
ValueError: of something around it
"""
HAPROXY = """
RuntimeError: HAProxy crashed during startup: [NOTICE]   (7) : haproxy version is 2.8.25
[NOTICE]   (7) : config : config: Can't open global server state file
[ALERT]    (7) : Binding [/x.cfg:50] for f: cannot bind socket (Address already in use) for [::1:80]
[ALERT]    (7) : [/x/haproxy.main()] Some protocols failed to start their listeners! Exiting.
"""

SCHEMA = """
1 validation error for ServeDeploySchema
proxy_location
  Input should be 'Disabled' or 'HeadOnly' [type=enum, input_value='Headonly', input_type=str]
    For further information visit https://errors.pydantic.dev/2.14/v/enum
"""


@pytest.mark.parametrize(
    ("message", "line"),
    [
        (SCHEMA, "proxy_location: Input should be 'Disabled' or 'HeadOnly'"),
        (
            f"pydantic.x.ValidationError: {SCHEMA.strip()}",
            "proxy_location: Input should be 'Disabled' or 'HeadOnly'",
        ),
        ("why\nFor further information visit https://x\n", "why"),
        (WRAPPED, "engine.threads = 0; allowed: 1 or more"),
        ("noise\nmodule.SomeError: first\nValueError: root\n", "ValueError: root"),
        (HAPROXY, "HAProxy cannot bind socket (Address already in use) for [::1:80]"),
        ("nothing raised\nthe last line\n", "the last line"),
        ("", ""),
    ],
    ids=[
        "Serve's schema",
        "the same raised",
        "a hint",
        "ours wins",
        "the last raised",
        "HAProxy",
        "nothing raised",
        "nothing",
    ],
)
def test_failure_line(message: str, line: str) -> None:
    assert failure_line(message) == line
    if "Error: " not in message and "validation error" not in message:
        assert failure_line(message, only_raised=True) == ""
