"""What an engine does behind the contract's names: one thread that steps, blocks that are reused, oddities.

Tokens follow from all tokens before them, so whoever holds the text goes on in the same way; the KV itself
is never there. What a hand-off needs travels in the opaque state alone, which names the prompt it is of.
`Knobs` are the faults that a test orders.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from array import array
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any
from zlib import crc32

from tests.fake_trtllm.contract import Contract
from tests.fake_trtllm.events import Block, EventLog
from tests.fake_trtllm.knobs import Knobs
from tests.fake_trtllm.requests import CONTEXT_ONLY, GENERATION_ONLY, Request, Response

_machines: dict[str, Machine] = {}  # of this process: a finished transfer is heard by its sender


class Machine:
    """The engine of one LLM object."""

    def __init__(self, contract: Contract, args: Any, classes: dict[str, Any]) -> None:
        model = json.loads((Path(args.model) / "config.json").read_text())
        fake = model.get("fake", {})
        self.contract, self.args, self.classes = contract, args, classes
        self.knobs = Knobs(step_s=fake.get("step_ms", 0) / 1e3)
        self.token_ids: list[int] = fake.get("token_ids") or list(range(3, model["vocab_size"]))
        self.eos_after: int | None = fake.get("eos_after")
        self.context = args.max_seq_len or model["max_position_embeddings"]
        self.block = args.kv_cache_config.tokens_per_block
        self.total = fake.get("blocks", 512)
        self.name = f"{id(self):x}-{time.monotonic_ns():x}"
        self.fatal: BaseException | None = None
        self.stopped = False
        self.shut_down_when_fatal = False
        self.seen: deque[dict[str, Any]] = deque(maxlen=1000)  # what was asked for, as it was
        self.aborts_in_transfer = 0
        self.iter = 0
        self.n_completed = 0
        self._next = 1
        self._queue: deque[Request] = deque()
        self._running: list[Request] = []
        self.lent: dict[int, tuple[Request, float]] = {}  # ctx id -> waits for its reader until
        self.leaked = 0
        self._cached: OrderedDict[int, int] = OrderedDict()  # block hash -> holders
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._events = EventLog(contract.profile, args.kv_cache_config, self.context, self.knobs)
        self._stats: deque[dict[str, Any]] = deque(maxlen=args.max_stats_len)
        _machines[self.name] = self
        self._events.created(self.total)
        self._thread = threading.Thread(target=self._main, name="fake-trtllm", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ asked from outside

    def submit(self, request: Request) -> None:
        with self._wake:
            self._queue.append(request)
            self._wake.notify()

    def next_id(self) -> int:
        with self._lock:
            self._next += 1
            return self._next

    def abort(self, request: Request) -> None:
        with self._wake:
            if request.stage == "transfer":
                self.aborts_in_transfer += 1
                self.knobs.hang = True  # what users saw: the whole worker wedges
                return
            if request in self._queue or request in self._running:
                self._finish(request, "cancelled", leak=self.knobs.leak_cancelled)
            self._wake.notify()

    def received(self, ctx_id: int) -> None:
        """The reader of `ctx_id` has it all."""
        with self._lock:
            self._unlend(ctx_id)

    def die(self, error: BaseException) -> None:
        self.fatal = error
        self.knobs.hang = True

    def restart_events(self) -> None:
        """As an engine that was started anew: events count from the beginning."""
        with self._lock:
            self._events.restart()

    def stop(self) -> None:
        self.shut_down_when_fatal |= self.fatal is not None
        with self._wake:
            self.stopped = True
            self._wake.notify()
        self._thread.join(5)
        _machines.pop(self.name, None)

    def poll_events(self) -> list[dict[str, Any]]:
        with self._lock:
            return self._events.poll()

    def poll_stats(self) -> list[dict[str, Any]]:
        with self._lock:
            found = list(self._stats) if self.args.enable_iter_perf_stats else []
            self._stats.clear()
            return found

    @property
    def held_blocks(self) -> int:
        with self._lock:
            return self._used()

    # ------------------------------------------------------------ the thread

    def _main(self) -> None:
        while not self.stopped:
            with self._wake:
                if self.knobs.hang:
                    self._wake.wait(0.02)
                    continue
                worked = self._step()
                if not worked:
                    self._wake.wait(0.005 if self._running or self.lent or self._queue else 0.1)
            if worked and self.knobs.step_s:
                time.sleep(self.knobs.step_s)

    def _step(self) -> bool:
        now = time.monotonic()
        for ctx_id in [i for i, (_, until) in self.lent.items() if until <= now]:
            self._unlend(ctx_id)
        n_ctx = self._admit(now)
        stepped = []
        for request in list(self._running):
            if request.stage == "transfer":
                if request.arrives_s is None or request.arrives_s > now:
                    continue
                self._received(request)
            if request.told or request.tokens or request.kind == GENERATION_ONLY:
                self._draw(request)
            stepped.append(request)
        if not stepped and not n_ctx:
            return False
        for request in stepped:
            self._tell(request)
        self.iter += 1
        self._stats.append(self._row(n_ctx, len(stepped)))
        return True

    def _admit(self, now: float) -> int:
        """Prompts that fit are computed whole; returns their tokens."""
        computed = 0
        while self._queue:
            request = self._queue[0]
            known = self._matched(request)
            need = -(-(len(request.ids) + 1) // self.block) - known
            if self._used() + need > self.total:
                break
            self._queue.popleft()
            self._running.append(request)
            self._hold(request, known)
            request.n_blocks = need
            if request.kind == GENERATION_ONLY:
                request.stage = "transfer"
                lost = self.knobs.lost_notices > 0
                self.knobs.lost_notices -= lost
                request.arrives_s = None if lost else now + self.knobs.transfer_s
                request.output._cached = len(request.ids)
                continue
            request.stage = "running"
            request.output._cached = known * self.block
            computed += len(request.ids) - known * self.block
            self._commit(request, request.ids[:-1])
            self._draw(request)
            self._tell(request)
        self._evict()
        return computed

    def _received(self, request: Request) -> None:
        handed = request.handed
        request.stage = "running"
        request.tokens += handed.first_gen_tokens
        if request.params.logprobs is not None and getattr(handed, "first_gen_log_probs", None):
            request.logprobs += handed.first_gen_log_probs
        self._commit(request, request.ids[:-1])
        if handed.opaque_state is not None:
            sender = _machines.get(json.loads(handed.opaque_state)["machine"])
            if sender is not None:
                sender.received(handed.ctx_request_id)

    def _draw(self, request: Request) -> None:
        if self._reason(request) is not None:
            return  # it ended with the token that was handed over
        text = request.ids + request.tokens
        params, n = request.params, len(request.tokens)
        seed = 0 if params.top_k == 1 else (params.seed or 0) + n
        if self.eos_after == n:
            token = params.end_id
        else:
            mixed = crc32(array("I", text).tobytes(), crc32(f"{seed}.{request.lora}".encode()))
            token = self.token_ids[mixed % len(self.token_ids)]
        request.tokens.append(token)
        if params.logprobs is not None:
            logprob = self.classes["Logprob"]
            beside = {self.token_ids[(token + i) % len(self.token_ids)]: i for i in range(params.logprobs)}
            entry = {other: logprob(-1.5 - i, i + 2) for other, i in beside.items()}
            entry[token] = logprob(-0.5 - (token % 7) / 10, 1)
            request.logprobs.append(entry)
        if request.n_blocks + len(request.hashes) < -(-(len(text) + 1) // self.block):
            request.n_blocks += 1

    def _reason(self, request: Request) -> str | None:
        params, n = request.params, len(request.tokens)
        if not n:
            return None
        last = request.tokens[-1]
        if n > (params.min_tokens or 0):
            if last == params.end_id and not params.ignore_eos:
                return "stop"
            if last in (params.stop_token_ids or ()):
                if not params.include_stop_str_in_output:
                    del request.tokens[-1]
                return "stop"
        if n >= params.max_tokens or len(request.ids) + n >= self.context:
            return "length"
        return None

    def _tell(self, request: Request) -> None:
        if request.fails and len(request.tokens) >= 3:
            error = self.classes["RequestError"]("the request's own fault")
            self._leave(request)
            request.output._push(Response(error=error))
            return
        reason = self._reason(request)
        if reason is not None:
            self._finish(request, reason)
        elif request.streaming:
            request.output._push(self._news(request))

    def _news(self, request: Request) -> Response:
        at, request.told = request.told, len(request.tokens)
        n_new = request.told - at
        logprobs = request.logprobs[max(len(request.logprobs) - n_new, 0) :] if n_new else []
        return Response(request.tokens[at:], logprobs)

    def _finish(self, request: Request, reason: str, leak: bool = False) -> None:
        if self.knobs.cancelled and reason != "cancelled":
            self.knobs.cancelled -= 1
            reason = "cancelled"
        if self.knobs.timed_out and reason != "cancelled":
            self.knobs.timed_out -= 1
            reason = "timeout"
        response = self._news(request)
        response.finish = reason
        handed_over = request.kind == CONTEXT_ONLY and reason == "length"
        if handed_over:
            response.handover = self._handover(request)
            if self.contract.profile == "main":
                response.finish = "not_finished"
        if leak:
            self.leaked += request.n_blocks
        if handed_over:
            timeout_ms = self.args.cache_transceiver_config.kv_transfer_timeout_ms
            until = float("inf") if timeout_ms is None else time.monotonic() + timeout_ms / 1e3
            self._running.remove(request)
            self.lent[request.number] = request, until
        else:
            self._leave(request, keep=reason in ("stop", "length"))
        self.n_completed += 1
        request.output._push(response)

    def _handover(self, request: Request) -> Any:
        known = {f["name"] for f in self.contract.fields("DisaggregatedParams")}
        values: dict[str, Any] = {
            "request_type": CONTEXT_ONLY,
            "first_gen_tokens": list(request.tokens),
        }
        if getattr(self.args.cache_transceiver_config, "transceiver_runtime", "CPP") == "PYTHON":
            values["disagg_request_id"] = request.handed.disagg_request_id
            values |= {"ctx_dp_rank": 0, "ctx_info_endpoint": f"fake://{self.name}"}
        else:
            values["ctx_request_id"] = request.number
            state = {"machine": self.name, "prompt": crc32(array("I", request.ids).tobytes())}
            values["opaque_state"] = json.dumps(state).encode()
            if "disagg_request_id" in known:
                values["disagg_request_id"] = request.handed.disagg_request_id
        if "first_gen_log_probs" in known and request.params.logprobs is not None:
            values["first_gen_log_probs"] = list(request.logprobs)
        if "ctx_usage" in known:
            values["ctx_usage"] = {"prompt_tokens": len(request.ids)}
        return self.classes["DisaggregatedParams"](**values)

    # ------------------------------------------------------------ blocks

    def _used(self) -> int:
        held = sum(1 for holders in self._cached.values() if holders)
        lent = [request for request, _ in self.lent.values()]
        return held + self.leaked + sum(r.n_blocks for r in self._running + lent)

    def _chain(self, request: Request, ids: list[int]) -> list[Block]:
        """The full blocks."""
        parent: int | None = None
        chain = []
        for at in range(0, len(ids) - self.block + 1, self.block):
            tokens = ids[at : at + self.block]
            text = f"{parent}|{request.salt}|{request.lora}|{tokens}".encode()
            digest = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
            chain.append((digest, parent, tokens))
            parent = digest
        return chain

    def _matched(self, request: Request) -> int:
        """Leading blocks that are cached; the last token is always computed."""
        n = 0
        for digest, _, _ in self._chain(request, request.ids[:-1]):
            if digest not in self._cached:
                break
            n += 1
        return n

    def _hold(self, request: Request, n: int) -> None:
        for digest, _, _ in self._chain(request, request.ids[:-1])[:n]:
            self._cached[digest] += 1
            self._cached.move_to_end(digest)
            request.hashes.append(digest)

    def _commit(self, request: Request, ids: list[int]) -> None:
        """Its full blocks become findable; one event a run."""
        fresh = []
        for digest, parent, tokens in self._chain(request, ids)[len(request.hashes) :]:
            request.hashes.append(digest)
            request.n_blocks -= 1
            self._cached[digest] = self._cached.get(digest, 0) + 1
            if self._cached[digest] == 1:
                fresh.append((digest, parent, tokens))
        if fresh:
            self._events.stored(request.salt, fresh)

    def _leave(self, request: Request, keep: bool = False) -> None:
        """Its blocks may be reused; what it generated is stored, with a last block that is not full."""
        if request in self._running:
            self._running.remove(request)
        if request in self._queue:
            self._queue.remove(request)
        if keep:
            text = request.ids + request.tokens[:-1]
            self._commit(request, text)
            rest = text[len(text) // self.block * self.block :]
            parent = request.hashes[-1] if request.hashes else None
            if rest:
                digest = int.from_bytes(hashlib.blake2b(f"{parent}|{rest}".encode()).digest()[:8], "little")
                self._events.stored(request.salt, [(digest, parent, rest)])
        for digest in request.hashes:
            self._cached[digest] -= 1
        self._evict()

    def _unlend(self, ctx_id: int) -> None:
        entry = self.lent.pop(ctx_id, None)
        if entry is not None:
            self._leave(entry[0], keep=False)

    def _evict(self) -> None:
        """Keep cached and private blocks within the pool; what nobody holds goes, oldest first."""
        gone = []
        lent = [request for request, _ in self.lent.values()]
        private = self.leaked + sum(r.n_blocks for r in self._running + lent)
        for digest in [d for d, holders in self._cached.items() if not holders]:
            if len(self._cached) + private <= self.total:
                break
            del self._cached[digest]
            gone.append(digest)
        self._events.removed(gone)

    def forget_cache(self) -> None:
        """Evict all that nobody holds."""
        with self._lock:
            total, self.total = self.total, 0
            self._evict()
            self.total = total

    # ------------------------------------------------------------ stats

    def _row(self, n_ctx: int, n_running: int) -> dict[str, Any]:
        used = self._used()
        batching: dict[str, Any] | None = {
            "numScheduledRequests": n_running,
            "numContextRequests": int(n_ctx > 0),
            "numGenRequests": n_running,
            "numPausedRequests": 0,
            "numCtxTokens": n_ctx,
            "microBatchId": 0,
            "avgNumDecodedTokensPerIter": 1.0,
        }
        if self.contract.profile == "main" and batching is not None:
            waiting = [r for r in self._queue if r.kind != GENERATION_ONLY]
            batching |= {
                "numCtxKvTokens": 0,
                "numGenKvTokens": 0,
                "numQueuedContextRequests": len(waiting),
                "numQueuedCtxTokens": sum(len(r.ids) for r in waiting),
                "numQueuedGenRequests": len(self._queue) - len(waiting),
                "numQueuedGenKvTokens": 0,
                "numPausedKvTokens": 0,
            }
        if self.knobs.null_batching:
            batching = None
        return {
            "iter": self.iter,
            "iterLatencyMS": max(self.knobs.step_s * 1e3, 0.1),
            "numActiveRequests": len(self._running),
            "numQueuedRequests": len(self._queue),
            "numCompletedRequests": self.n_completed,
            "maxNumActiveRequests": 64,
            "gpuMemUsage": 0,
            "kvCacheStats": {
                "maxNumBlocks": self.total,
                "freeNumBlocks": self.total - used,
                "usedNumBlocks": used,
                "tokensPerBlock": self.block,
                "allocTotalBlocks": 0,
                "allocNewBlocks": 0,
                "reusedBlocks": 0,
                "missedBlocks": 0,
                "cacheHitRate": 0.0,
            },
            "inflightBatchingStats": batching,
            "specDecodingStats": None,
            "staticBatchingStats": None,
        }
