"""Serve's REST interface on a cluster's dashboard: deploy a configuration, follow it, list its replicas.

The same that `serve deploy` and `serve status` use; needs no ray in this process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from serving.errors import StartError
from serving.local.status import Status, failure_line

POLL_S = 0.2
ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class Replica:
    """As Serve lists it now; `address` of its node, None while it has none."""

    deployment: str
    ident: str
    state: str
    address: str | None


class ServeRest:
    """`token` is Ray's, of RAY_AUTH_TOKEN_PATH."""

    def __init__(self, dashboard_url: str, token: str) -> None:
        self._url = dashboard_url + "/api/serve/applications/"
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}

    def deploy(
        self,
        document: Mapping[str, Any],
        *,
        deadline: float,
        on_status: Callable[[Status], None] | None = None,
    ) -> None:
        """Declare `document` and wait until all of it runs; `deadline` is of `time.monotonic`.

        Raises StartError with the application's own message if it fails, or with what was waited for.
        """
        self._ask("PUT", document, deadline)
        while True:
            status = self._status(deadline)
            if on_status is not None:
                on_status(status)
            if status.state == "running":
                return
            if status.state == "failed":
                raise StartError(failure_line(status.message) or "the application failed to deploy")
            if time.monotonic() > deadline:
                raise StartError(f"not ready in time: {status.summary}")
            time.sleep(POLL_S)

    def replicas(self) -> list[Replica]:
        """All that Serve knows of, those that start or stop too."""
        listed = self._ask("GET", None, time.monotonic() + ANSWER_S)
        return [
            Replica(name, str(replica["replica_id"]), str(replica["state"]), replica["node_ip"])
            for application in listed["applications"].values()
            for name, deployment in application["deployments"].items()
            for replica in deployment["replicas"]
        ]

    def _status(self, deadline: float) -> Status:
        applications = self._ask("GET", None, deadline)["applications"]
        states = {application["status"] for application in applications.values()}
        if "DEPLOY_FAILED" in states:
            state = "failed"
        else:
            state = "running" if states == {"RUNNING"} else "deploying"
        return Status.of({"state": state, "applications": applications})

    def _ask(self, method: str, document: Mapping[str, Any] | None, deadline: float) -> Any:
        """Again until `deadline` while the dashboard is not up, or says that Serve is not."""
        body = None if document is None else json.dumps(document).encode()
        request = Request(self._url, method=method, data=body, headers=self._headers)
        while True:
            try:
                with urlopen(request, timeout=ANSWER_S) as answer:
                    text = answer.read()
                return json.loads(text) if text else None
            except HTTPError as error:
                with error:
                    said = error.read().decode(errors="replace")
                if error.code < 500 or time.monotonic() > deadline:
                    raise StartError(failure_line(said) or f"{self._url} says {error.code}") from None
            except OSError as error:
                if time.monotonic() > deadline:
                    raise StartError(f"{self._url}: {error}") from None
            time.sleep(POLL_S)
