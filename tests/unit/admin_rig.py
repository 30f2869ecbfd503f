"""What `kvrelay admin` talks to: a small local server, and what Control says of workers and planner."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "an-admin-key-of-32-characters-xx"


class Application:
    """Answers `routes` ((method, path) -> status, body; a list is answered one after another, the last one
    for good) to whoever has the key, and keeps what was asked."""

    def __init__(self, routes: dict[tuple[str, str], Any]) -> None:
        self.routes = routes
        self.asked: list[tuple[str, str, Any]] = []
        application = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                application.asked.append((self.command, self.path, json.loads(body) if body else None))
                status, told = application.told(self.command, self.path, self.headers["authorization"])
                raw = told if isinstance(told, bytes) else json.dumps(told).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer

            def log_message(self, format: str, *arguments: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    def told(self, method: str, path: str, authorization: str) -> tuple[int, Any]:
        if authorization != f"Bearer {KEY}":
            return 401, error("this path wants the admin key as a bearer token")
        answer = self.routes.get((method, path), (404, error("there is nothing at this path")))
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        return answer if isinstance(answer, tuple) else (200, answer)


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "param": None, "code": None}}


def worker(ident: str, pool: str = "decode", **more: Any) -> dict[str, Any]:
    return {
        "worker": ident,
        "model": "chat",
        "variant": "main",
        "pool": pool,
        "role": pool,
        "ordered_to_drain": False,
        "draining": False,
        "requests": 0,
        "leases": 0,
        "free_blocks": 4096,
        "reported": True,
        "safe_to_remove": False,
        **more,
    }


DRAINING = worker("d1", draining=True, ordered_to_drain=True, requests=2)
LAST = worker("d1", draining=True, ordered_to_drain=True, unsafe_because="the last one")
EMPTY = worker("d1", draining=True, ordered_to_drain=True, safe_to_remove=True)
TWO = {"workers": [worker("d1"), worker("p1", "prefill")]}


def variant(prefill: int, decode: int, lent: int = 0, reason: str = "as needed") -> dict[str, Any]:
    return {
        "prefill": prefill,
        "decode": decode,
        "lent": lent,
        "reason": reason,
        "wanted": [prefill, decode],
        "forecast_rps": 2.5,
        "reachable": None,
    }


def pool(ready: int = 0, **more: int) -> dict[str, int]:
    return {"ready": ready, "lent": 0, "starting": 0, "draining": 0, **more}


def planner(**more: Any) -> dict[str, Any]:
    seen = {
        "window_s": 2.0,
        "arrivals": 6,
        "queued": 1,
        "decoding": None,
        "pools": {"prefill": pool(1), "decode": pool(2, starting=1)},
    }
    return {
        "mode": "act",
        "trouble": None,
        "budget": 8.0,
        "budget_unit": "GPUs",
        "targets": {
            "chat/main": {"ttft_ms": 800, "ttft_ms_per_1k_tokens": 50, "itl_ms": 40, "percentile": 95}
        },
        "startup_s": {"chat/main": 23.4},
        "flip_s": {"chat/main": 2.1},
        "observation": {"variants": {"chat/main": seen}, "frontends": 1, "inflight": 3},
        "decision": {"variants": {"chat/main": variant(1, 4)}, "frontends": None, "reason": "x"},
        "reason": "x",
        "history": [
            {"at_s": 1000.0 + tick, "mode": "act", "variants": {"chat/main": one}}
            for tick, one in enumerate(
                [variant(1, 2), variant(1, 2), variant(1, 3, reason="up"), variant(2, 3)]
            )
        ],
        **more,
    }
