"""`kvrelay admin`: the operator's command, over HTTP to any frontend.

kvrelay admin workers                     who is there, what it does, whether it is safe to remove
kvrelay admin drain WORKER [--wait S]     no new requests; waits until it is safe to remove
kvrelay admin undrain WORKER
kvrelay admin remove WORKER               a drained one, for good: one replica less
kvrelay admin weights [MODEL main=90 canary=10]    shows, or sets, the traffic shares; all of them
kvrelay admin settings [KEY=VALUE ...]    shows, or changes, the live settings
kvrelay admin planner [KEY=VALUE ...]     shows the planner, or changes mode, targets, budget

Exit codes as of `kvrelay`: 2 for what was asked wrongly, unknown names too; 1 for what is refused or fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import Request, urlopen

from serving.admin_tables import planner_summary, worker_state, workers_table
from serving.errors import ConfigError, StartError
from serving.local.environment import ADMIN_KEY_FILE, admin_key_file

TIMEOUT_S = 10.0
POLL_S = 0.5


def add_parser(commands: Any) -> None:
    """`commands`: the subparsers of `kvrelay`."""
    admin = commands.add_parser("admin", help="operate a running application: drain, weights, settings")
    admin.add_argument("--url", default="http://127.0.0.1:8000", help="of any frontend (%(default)s)")
    admin.add_argument(
        "--key-file",
        default=admin_key_file(),
        required=admin_key_file() is None,
        help=f"the file that security.admin_key_file names; default: the value of {ADMIN_KEY_FILE}",
    )
    admin.add_argument("--json", action="store_true", help="print what the application answered")
    verbs = admin.add_subparsers(required=True, metavar="VERB")
    _add_verbs(verbs)
    for verb in verbs.choices.values():  # after the verb as well
        verb.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_verbs(verbs: Any) -> None:
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

    weights = verbs.add_parser("weights", help="show or set the traffic shares of a model's variants")
    weights.add_argument("model", nargs="?")
    weights.add_argument("shares", nargs="*", metavar="VARIANT=WEIGHT", help="of every variant")
    weights.set_defaults(run=_weights)

    settings = verbs.add_parser("settings", help="show or change the live settings")
    settings.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    settings.set_defaults(run=_settings)

    planner = verbs.add_parser("planner", help="show the planner, or change its mode, targets and budget")
    planner.add_argument("changes", nargs="*", metavar="KEY=VALUE")
    planner.set_defaults(run=_planner)


def _workers(options: argparse.Namespace) -> int:
    told = _ask(options, "GET", "/admin/workers")
    return _print(told) if options.json else _say(workers_table(told))


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
        why = told.get("unsafe_because")
        print(f"{name}: {worker_state(told)}, {left}" + (f"; {why}" if why else ""))
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
    if not options.shares:
        return _show_weights(options)
    shares = {key: _share(key, value) for key, value in _pairs(options.shares, "VARIANT=WEIGHT").items()}
    told = _ask(options, "PUT", f"/admin/weights/{quote(options.model)}", shares)
    if options.json:
        return _print(told)
    return _say(f"{options.model}: {_percent(shares)}")


def _show_weights(options: argparse.Namespace) -> int:
    told = _ask(options, "GET", "/admin/weights")
    if options.model is not None:
        if options.model not in told:
            known = ", ".join(told) or "none"
            raise ConfigError(f"there is no model {options.model!r}; there are: {known}")
        told = {options.model: told[options.model]}
    if options.json:
        return _print(told)
    return _say("\n".join(f"{model}: {_percent(shares)}" for model, shares in told.items()))


def _percent(shares: dict[str, float]) -> str:
    total = sum(shares.values())
    return ", ".join(f"{name} {100 * share / total:g} %" for name, share in shares.items())


def _settings(options: argparse.Namespace) -> int:
    changes = {key: _value(text) for key, text in _pairs(options.changes).items()}
    return _print(_ask(options, "PATCH" if changes else "GET", "/admin/settings", changes or None))


def _planner(options: argparse.Namespace) -> int:
    changes = {key: _value(text) for key, text in _pairs(options.changes).items()}
    told = _ask(options, "PATCH" if changes else "GET", "/planner", changes or None)
    return _print(told) if options.json else _say(planner_summary(told))


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


def _pairs(texts: list[str], form: str = "KEY=VALUE") -> dict[str, str]:
    for text in texts:
        if "=" not in text:
            raise ConfigError(f"{text!r}: give {form}")
    return dict(text.split("=", 1) for text in texts)


def _share(variant: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{variant} = {text!r}; allowed: a number, 0 or more") from None


def _value(text: str) -> Any:
    """JSON where it is some, else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _ask(options: argparse.Namespace, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """Raises ConfigError for a wrong option, StartError for what went wrong; both in one line."""
    from serving.link_key import read_key

    if not options.url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {options.url}: allowed: http://HOST:PORT of a frontend, or https://")
    key = read_key(options.key_file, "--key-file").decode("latin-1")
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    try:
        request = Request(options.url.rstrip("/") + path, data=data, headers=headers, method=method)
        with urlopen(request, timeout=TIMEOUT_S) as response:
            told = json.load(response)
    except HTTPError as error:
        # A name that is not there, a value that is not allowed; but a removal is refused with a 400.
        asked_wrongly = error.code == 404 or (error.code == 400 and method != "DELETE")
        reason, routed = _reason(error, options)
        kind = ConfigError if asked_wrongly and routed else StartError
        raise kind(f"{options.url}: {reason}") from None
    except (URLError, OSError, HTTPException, ValueError) as error:
        raise StartError(f"{options.url} does not answer: {getattr(error, 'reason', error)}") from None
    if not isinstance(told, dict):
        raise StartError(f"{options.url} is no KVRelay: it answered {json.dumps(told)[:80]}")
    return told


def _reason(error: HTTPError, options: argparse.Namespace) -> tuple[str, bool]:
    """What was said, and whether an admin route said it."""
    try:
        said = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{error.code}, {error.reason}", False
    if error.code == 401:
        return (
            f"the key in {options.key_file} is not the one that security.admin_key_file names there",
            True,
        )
    if said == "there is nothing at this path":  # no route has this answer but when there are no routes
        return "it has no admin routes: its configuration names no security.admin_key_file", False
    return f"{error.code}, {said}", True


def _print(told: dict[str, Any]) -> int:
    return _say(json.dumps(told, indent=2))


def _say(text: str) -> int:
    print(text, file=sys.stdout)
    return 0
