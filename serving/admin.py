"""What an operator may ask of Control, by verb: each answers an HTTP status and a JSON-able body.

`serving.admin_api` maps paths to verbs at a frontend's door; `kvrelay admin` is the command for it. The
planner adds verbs of its own (`Admin.add`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from serving.errors import ConfigError, InvalidRequest, KVRelayError, NotFound, error_body

if TYPE_CHECKING:
    from serving.control_host import ControlHost, ReportedWorker

Verb = Callable[[dict[str, Any]], dict[str, Any]]  # raises KVRelayError

log = logging.getLogger("kvrelay.control")

READS = frozenset({"workers", "settings", "shares", "planner"})  # verbs that change nothing
FRESH_S = 3.0  # a report older than this says nothing of whether a worker is safe to remove


class Admin:
    """The verbs over one ControlHost."""

    def __init__(self, host: ControlHost) -> None:
        self._host = host
        self._verbs: dict[str, Verb] = {
            "workers": self._workers,
            "drain": self._drain,
            "undrain": self._undrain,
            "settings": lambda arguments: self._host.settings,
            "change": self._change,
            "shares": lambda arguments: self._shares(),
            "weights": self._weights,
        }

    def add(self, verb: str, answer: Verb) -> None:
        self._verbs[verb] = answer

    def answer(self, verb: str, arguments: dict[str, Any], peer: str = "?") -> tuple[int, dict[str, Any]]:
        """Status and body, whatever goes wrong with what was asked. A change that is accepted leaves one
        line in the log: verb, old and new value, and `peer`, the frontend that it came through."""
        try:
            answer = self._verbs.get(verb)
            if answer is None:
                raise NotFound("there is nothing at this path")
            before = self._standing(arguments)
            told = answer(arguments)
            if verb not in READS:
                fields = {"peer": peer, "verb": verb, **_changed(before, self._standing(arguments))}
                if "worker" in told:
                    fields["worker"] = told["worker"]
                log.info("changed by an operator", extra={"fields": fields})
            return 200, told
        except ConfigError as error:
            return InvalidRequest.status, error_body(InvalidRequest(error.message))
        except KVRelayError as error:
            return error.status, error_body(error)
        except Exception:  # must not cost the link that the question came on
            log.exception("%s failed", verb)
            return KVRelayError.status, error_body(KVRelayError(f"{verb} failed; Control's log says why"))

    def _standing(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """All that verbs change, flat: what the log compares."""
        settings = self._host.settings
        standing = {f"planner.{key}": value for key, value in settings.pop("planner").items()}
        if "worker" in arguments:
            standing["draining"] = arguments["worker"] in self._host.orders.draining
        return standing | settings

    # ------------------------------------------------------------ workers

    def _workers(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"workers": [self.told(ident) for ident in sorted(self._host.known_workers)]}

    def told(self, ident: str) -> dict[str, Any]:
        """How a worker stands. Raises NotFound."""
        ident = self._named({"worker": ident})
        worker = self._host.known_workers[ident]
        report = worker.report
        unsafe = self._unsafe(ident, worker)
        told: dict[str, Any] = {
            "worker": ident,
            **worker.labels,
            "address": worker.address,
            "ordered_to_drain": ident in self._host.orders.draining,
            "reported": _fresh(worker),
            "safe_to_remove": unsafe is None,
            "unsafe_because": unsafe,
        }
        if report is None:
            return told
        return told | {
            "role": report.role,
            "draining": report.draining,
            "requests": report.attempts,
            "leases": report.leases,
            "running": report.running,
            "waiting": report.waiting,
            "free_blocks": report.free_blocks,
            "total_blocks": report.total_blocks,
            "step_ms": round(report.step_ms, 3),
        }

    def _unsafe(self, ident: str, worker: ReportedWorker) -> str | None:
        """Why not to remove it. None: nobody gets a token from it, reads its KV or writes into it, and
        nothing new comes."""
        report = worker.report
        if report is None or not _fresh(worker):
            return "it does not report"
        if not report.draining:
            return "it serves; drain it first"
        if report.busy:
            return "it is not empty yet"
        others = [
            other
            for name, other in self._host.workers.items()
            if name != ident and _variant(other) == _variant(worker)
        ]
        if not any(o.report and o.report.role == report.role and not o.report.draining for o in others):
            return f"no other worker plays {report.role}, so it still gets requests"
        if not any(other.labels.get("pool") == worker.labels.get("pool") for other in others):
            return "it is the last of its pool"
        return None

    def _drain(self, arguments: dict[str, Any]) -> dict[str, Any]:
        ident = self._named(arguments)
        self._host.orders.drain(ident)
        return self.told(ident)

    def _undrain(self, arguments: dict[str, Any]) -> dict[str, Any]:
        ident = self._named(arguments)
        self._host.orders.undrain(ident)
        return self.told(ident)

    def _named(self, arguments: dict[str, Any]) -> str:
        ident = str(arguments.get("worker"))
        known_workers = self._host.known_workers
        if ident not in known_workers:
            known = ", ".join(sorted(known_workers)) or "none"
            raise NotFound(f"there is no worker {ident!r}; there are: {known}")
        return ident

    # ------------------------------------------------------------ settings

    def _change(self, arguments: dict[str, Any]) -> dict[str, Any]:
        weights = arguments.get("weights")
        if isinstance(weights, dict):  # else it is refused as what it is
            for model, shares in weights.items():
                if isinstance(shares, dict):
                    self._check_shares(str(model), shares)
        return self._host.change_settings(arguments)

    def _shares(self) -> dict[str, Any]:
        """As they are in force: a model without weights sends everything to its first variant."""
        shares = {}
        for model, variants in self._host.variants.items():
            weights = self._host.settings["weights"].get(model, {})
            share = {variant: weights.get(variant, 0.0) for variant in variants}
            shares[model] = share if any(share.values()) else {**share, variants[0]: 1.0}
        return shares

    def _weights(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Traffic shares of one model's variants, of all of them; other models' as they were."""
        model, weights = str(arguments.get("model")), arguments.get("weights")
        if not isinstance(weights, dict) or not weights:
            raise InvalidRequest('weights: give every variant\'s share, as in {"main": 90, "canary": 10}')
        self._check_shares(model, weights)
        return self._host.change_settings({"weights": {**self._host.settings["weights"], model: weights}})

    def _check_shares(self, model: str, weights: dict[str, Any]) -> None:
        """Raises NotFound, InvalidRequest: a variant that is not named would get nothing."""
        variants = self._host.variants.get(model)
        if variants is None:
            known = ", ".join(sorted(self._host.variants)) or "none"
            raise NotFound(f"weights: there is no model {model!r}; there are: {known}")
        for variant in weights:
            if variant not in variants:
                raise InvalidRequest(
                    f"weights: {model!r} has no variant {variant!r}; allowed: {', '.join(variants)}"
                )
        missing = [variant for variant in variants if variant not in weights]
        if missing:
            whole = " ".join(f"{v}={weights.get(v, 'SHARE')}" for v in variants)
            raise InvalidRequest(
                f"weights: no share for {', '.join(missing)}; name every variant: weights {model} {whole}"
            )
        if not any(weights.values()):
            raise InvalidRequest("weights: all are 0; at least one variant must answer")


def _changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    keys = [key for key in after if before[key] != after[key]]
    return {"old": {key: before[key] for key in keys}, "new": {key: after[key] for key in keys}}


def _fresh(worker: ReportedWorker) -> bool:
    return worker.linked and worker.report is not None and worker.age_s < FRESH_S


def _variant(worker: ReportedWorker) -> tuple[str | None, str | None]:
    return worker.labels.get("model"), worker.labels.get("variant")
