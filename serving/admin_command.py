"""`kvrelay admin`: the operator's command, over HTTP to any frontend.

kvrelay admin workers                     who is there, what it does, whether it is safe to remove
kvrelay admin drain WORKER [--wait S]     no new requests; waits until it is safe to remove
kvrelay admin undrain WORKER
kvrelay admin weights MODEL main=90 canary=10
kvrelay admin settings [KEY=VALUE ...]    shows, or changes, the live settings
kvrelay admin planner [KEY=VALUE ...]     shows the planner, or changes mode, targets, budget
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from serving.errors import ConfigError, StartError

TIMEOUT_S = 10.0
POLL_S = 0.5
COLUMNS = (
    ("worker", "worker"),
    ("pool", "pool"),
    ("role", "role"),
    ("requests", "requests"),
    ("leases", "leases"),
    ("free_blocks", "free blocks"),
    ("state", "state"),
)


def add_parser(commands: Any) -> None:
    """`commands`: the subparsers of `kvrelay`."""
    admin = commands.add_parser("admin", help="operate a running application: drain, weights, settings")
    admin.add_argument("--url", default="http://127.0.0.1:8000", help="of any frontend (%(default)s)")
    admin.add_argument(
        "--key-file", required=True, help="the file that security.admin_key_file names in the configuration"
    )
    admin.add_argument("--json", action="store_true", help="print what the application answered")
    verbs = admin.add_subparsers(required=True, metavar="VERB")

    workers = verbs.add_parser("workers", help="list workers and whether they are safe to remove")
    workers.set_defaults(run=_workers)

    drain = verbs.add_parser("drain", help="give a worker nothing new and move what runs on it")
    drain.add_argument("worker", help="its name, or the end of it")
    drain.add_argument("--wait", type=float, default=0.0, metavar="S", help="until it is safe to remove")
    drain.set_defaults(run=_drain)

    undrain = verbs.add_parser("undrain", help="take a worker back")
    undrain.add_argument("worker", help="its name, or the end of it")
    undrain.set_defaults(run=_undrain)

    remove = verbs.add_parser("remove", help="take a drained worker away: one replica less")
    remove.add_argument("worker", help="its name, or the end of it")
    remove.set_defaults(run=_remove)

    weights = verbs.add_parser("weights", help="traffic shares of a model's variants, from now on")
    weights.add_argument("model")
    weights.add_argument("shares", nargs="+", metavar="VARIANT=WEIGHT")
    weights.set_defaults(run=_weights)

    settings = verbs.add_parser("settings", help="show or change the live settings")
    settings.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    settings.set_defaults(run=_settings)

    planner = verbs.add_parser("planner", help="show the planner, or change its mode, targets and budget")
    planner.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    planner.set_defaults(run=_planner)


def _workers(options: argparse.Namespace) -> int:
    told = _ask(options, "GET", "/admin/workers")
    if options.json:
        return _print(told)
    rows = [[heading for _, heading in COLUMNS]]
    for worker in told["workers"]:
        row = worker | {"state": _state(worker)}
        rows.append([str(row.get(key, "?")) for key, _ in COLUMNS])
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _state(worker: dict[str, Any]) -> str:
    if worker["safe_to_remove"]:
        return "safe to remove"
    if not worker["reported"]:
        return "silent"
    return "draining" if worker["draining"] or worker["ordered_to_drain"] else "serving"


def _drain(options: argparse.Namespace) -> int:
    name = _full_name(options)
    told = _ask(options, "POST", f"/admin/workers/{quote(name)}/drain")
    until_s = time.monotonic() + options.wait
    while not told["safe_to_remove"] and time.monotonic() < until_s:
        time.sleep(POLL_S)
        told = next(
            (w for w in _ask(options, "GET", "/admin/workers")["workers"] if w["worker"] == name), {}
        )
        if not told:
            raise StartError(f"{name} left while it was drained")
    if options.json:
        _print(told)
    else:
        left = f"{told.get('requests', '?')} requests, {told.get('leases', '?')} leases"
        print(f"{name}: {_state(told)}, {left}")
    return 0 if told["safe_to_remove"] or not options.wait else 1


def _undrain(options: argparse.Namespace) -> int:
    name = _full_name(options)
    told = _ask(options, "POST", f"/admin/workers/{quote(name)}/undrain")
    return _print(told) if options.json else _say(f"{name}: serves again")


def _remove(options: argparse.Namespace) -> int:
    name = _full_name(options)
    told = _ask(options, "DELETE", f"/admin/workers/{quote(name)}")
    return _print(told) if options.json else _say(f"{name}: is being removed")


def _weights(options: argparse.Namespace) -> int:
    shares = {key: float(value) for key, value in _pairs(options.shares).items()}
    told = _ask(options, "PUT", f"/admin/weights/{quote(options.model)}", shares)
    if options.json:
        return _print(told)
    total = sum(shares.values())
    return _say(
        f"{options.model}: " + ", ".join(f"{name} {100 * w / total:g} %" for name, w in shares.items())
    )


def _settings(options: argparse.Namespace) -> int:
    changes = {key: _value(text) for key, text in _pairs(options.changes).items()}
    return _print(_ask(options, "PATCH" if changes else "GET", "/admin/settings", changes or None))


def _planner(options: argparse.Namespace) -> int:
    changes = {key: _value(text) for key, text in _pairs(options.changes).items()}
    return _print(_ask(options, "PATCH" if changes else "GET", "/planner", changes or None))


def _full_name(options: argparse.Namespace) -> str:
    """Serve's names are long: the end of one is enough where it fits one worker."""
    names = [worker["worker"] for worker in _ask(options, "GET", "/admin/workers")["workers"]]
    fitting = [name for name in names if name == options.worker] or [
        name for name in names if name.endswith(options.worker)
    ]
    if len(fitting) != 1:
        what = "no worker is" if not fitting else "several workers are"
        raise ConfigError(f"{what} called {options.worker!r}; there are: {', '.join(names) or 'none'}")
    return str(fitting[0])


def _pairs(texts: list[str]) -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise ConfigError(f"{text!r}: give KEY=VALUE")
    return dict(text.split("=", 1) for text in texts)


def _value(text: str) -> Any:
    """JSON where it is some, else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _ask(options: argparse.Namespace, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """Raises StartError with what went wrong in one line."""
    try:
        key = Path(options.key_file).read_text().strip()
    except OSError as error:
        raise ConfigError(f"--key-file {options.key_file}: {error.strerror}") from None
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = Request(options.url.rstrip("/") + path, data=data, headers=headers, method=method)
    try:
        with urlopen(request, timeout=TIMEOUT_S) as response:
            told = json.load(response)
    except HTTPError as error:
        raise StartError(f"{options.url}: {error.code}, {_reason(error)}") from None
    except (URLError, TimeoutError, ValueError) as error:
        raise StartError(f"{options.url} does not answer: {getattr(error, 'reason', error)}") from None
    assert isinstance(told, dict)
    return told


def _reason(error: HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return error.reason


def _print(told: dict[str, Any]) -> int:
    return _say(json.dumps(told, indent=2))


def _say(text: str) -> int:
    print(text, file=sys.stdout)
    return 0
