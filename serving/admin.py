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
    from serving.control_host import ControlHost

Verb = Callable[[dict[str, Any]], dict[str, Any]]  # raises KVRelayError

log = logging.getLogger("kvrelay.control")

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
            "weights": self._weights,
        }

    def add(self, verb: str, answer: Verb) -> None:
        self._verbs[verb] = answer

    def answer(self, verb: str, arguments: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body, whatever goes wrong with what was asked."""
        try:
            answer = self._verbs.get(verb)
            if answer is None:
                raise NotFound("there is nothing at this path")
            return 200, answer(arguments)
        except ConfigError as error:
            return InvalidRequest.status, error_body(InvalidRequest(error.message))
        except KVRelayError as error:
            return error.status, error_body(error)
        except Exception:  # must not cost the link that the question came on
            log.exception("%s failed", verb)
            return KVRelayError.status, error_body(KVRelayError(f"{verb} failed; Control's log says why"))

    # ------------------------------------------------------------ workers

    def _workers(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"workers": [self.told(ident) for ident in sorted(self._host.workers)]}

    def told(self, ident: str) -> dict[str, Any]:
        """How a worker stands. Raises NotFound."""
        ident = self._named({"worker": ident})
        worker = self._host.workers[ident]
        report, age_s = worker.report, worker.age_s
        told: dict[str, Any] = {
            "worker": ident,
            **worker.labels,
            "address": worker.address,
            "ordered_to_drain": ident in self._host.orders.draining,
        }
        if report is None:
            return told | {"reported": False, "safe_to_remove": False}
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
            "reported": age_s < FRESH_S,
            # Nobody gets a token from it, reads its KV or writes into it, and nothing new comes.
            "safe_to_remove": report.draining and not report.busy and age_s < FRESH_S,
        }

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
        if ident not in self._host.workers:
            known = ", ".join(sorted(self._host.workers)) or "none"
            raise NotFound(f"there is no worker {ident!r}; there are: {known}")
        return ident

    # ------------------------------------------------------------ settings

    def _change(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return self._host.change_settings(arguments)

    def _weights(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Traffic shares of one model's variants, the others' as they were."""
        model, weights = arguments.get("model"), arguments.get("weights")
        if not isinstance(weights, dict) or not weights:
            raise InvalidRequest('weights: give every variant\'s share, as in {"main": 90, "canary": 10}')
        variants = self._host.variants.get(str(model))
        if variants is None:
            known = ", ".join(sorted(self._host.variants)) or "none"
            raise NotFound(f"there is no model {model!r}; there are: {known}")
        for variant in weights:
            if variant not in variants:
                raise InvalidRequest(
                    f"weights: {model!r} has no variant {variant!r}; allowed: {', '.join(variants)}"
                )
        if not any(weights.values()):
            raise InvalidRequest("weights: all are 0; at least one variant must answer")
        return self._host.change_settings({"weights": {**self._host.settings["weights"], model: weights}})
