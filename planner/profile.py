"""Measure what an engine takes, for the planner and the router to start from.

    python -m planner.profile --weights smollm2-135m --engine torch --out profiles/smollm2
    python -m planner.profile --config configs/quickstart.yaml --out profiles/quickstart

Drives a real engine of this installation through a small grid, alone on this machine: prompts of growing
length with nothing, half and most of them cached, then batches of decodes. Fits kvrouter.perf_model's
forms, writes OUT.json with where it was measured, and OUT.png with the points and the fit. Takes minutes.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import count, pairwise
from pathlib import Path

from planner.fit_times import fit_prefill, fit_step
from planner.observation import FittedTimes
from planner.options import Number, Option, OptionParser
from planner.profile_picture import draw_fit
from planner.timing_profile import Profile, Provenance, save_profile
from serving import __version__
from serving.config import Variant, load_config
from serving.engine.base import AttemptId, Engine, Mode, SamplingParams, StepOutput, Work
from serving.engine.factory import build_engine
from serving.errors import KVRelayError, StartError
from serving.gpu_probe import probe
from serving.manifest import model_digest, resolve_weights
from serving.preflight import find_config, read_plan
from serving.progress import shown_progress
from serving.worker_spec import ROLES, on_gpu, parallel_of

__all__ = ["device_name", "measure", "provenance_of"]

Report = Callable[[str, float], None]

FIRST_ID, LAST_ID = 100, 1000  # token ids of prompts: plain words of any vocabulary
SHORTEST = 64  # tokens of a prompt
GROWTH = 2  # from one length to the next
REPEATS = 3
NEW_TOKENS = 16  # of each decode
CONTEXTS = (64, 512, 2048)  # of decodes
CASE_S = 20.0  # a case that would take longer is left out
MOST_SPREAD = 0.25  # typical error of a fit that is still of use
ANSWER_S = 600.0  # after which the engine counts as stuck


class Driver:
    """A started engine, one request or batch at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._attempts = count(1)
        self._next = 0
        self._left = 0
        self._ends: list[tuple[float, int]] = []  # (time, tokens) of each step
        self._done = threading.Event()
        self._failed: str | None = None
        engine.start(self._heard)

    def fresh(self, n_tokens: int) -> list[int]:
        """A prompt that was never seen before: its first tokens count upwards."""
        self._next += 1
        span = LAST_ID - FIRST_ID
        head = [FIRST_ID + self._next % span, FIRST_ID + self._next // span % span]
        return (head + [FIRST_ID + (7 * i + self._next) % span for i in range(n_tokens)])[:n_tokens]

    def run(
        self, prompts: Sequence[Sequence[int]], new_tokens: int
    ) -> tuple[float, list[tuple[float, int]]]:
        """Submit all at once; the time of that, and every later step's (end, tokens)."""
        params = SamplingParams(max_tokens=new_tokens, seed=0, temperature=0.0, ignore_eos=True)
        works = [
            Work(AttemptId(next(self._attempts)), Mode.LOCAL, array("I", p), len(p), params, 0)
            for p in prompts
        ]
        self._done.clear()
        self._ends, self._left = [], len(prompts)
        began = time.perf_counter()
        for work in works:
            self._engine.submit(work)
        if not self._done.wait(ANSWER_S):
            raise StartError(f"the engine did not answer within {ANSWER_S:g} s")
        if self._failed is not None:
            raise StartError(f"the engine failed: {self._failed}")
        return began, self._ends

    def _heard(self, output: StepOutput) -> None:
        if output.tokens:
            self._ends.append((time.perf_counter(), len(output.tokens)))
        for failed in output.failed:
            self._failed = failed.message
        self._left -= len(output.finished) + len(output.failed)
        if self._left <= 0:
            self._done.set()

    def prefill_ms(self, prompt: Sequence[int]) -> float:
        began, ends = self.run([prompt], 1)
        return (ends[0][0] - began) * 1e3

    def step_ms(self, prompts: Sequence[Sequence[int]]) -> list[float]:
        """Of the steps in which all of them decode."""
        _, ends = self.run(prompts, NEW_TOKENS)
        full = [end for end, tokens in ends if tokens == len(prompts)]
        return [(later - earlier) * 1e3 for earlier, later in pairwise(full)]


def measure(
    engine: Engine, max_batch: int, report: Report, case_s: float = CASE_S
) -> tuple[list[tuple[int, int, float]], list[tuple[int, int, float]]]:
    """Points (uncached, context, ms) and (batch, KV tokens, ms); stops the engine.

    Cases that would take longer than `case_s` are left out, so long prompts on a slow machine are.
    """
    driver = Driver(engine)
    room = engine.memory.n_blocks * engine.block_tokens - 4 * engine.block_tokens
    longest = min(engine.context_tokens - NEW_TOKENS - 1, room // 2)
    try:
        driver.run([driver.fresh(SHORTEST)], NEW_TOKENS)  # the first steps are slow as no other
        prefill = _measure_prefill(driver, longest, engine.block_tokens, case_s, report)
        step = _measure_steps(driver, longest, room, max_batch, case_s=case_s, report=report)
    finally:
        engine.stop()
    return prefill, step


def _measure_prefill(
    driver: Driver, longest: int, block: int, case_s: float, report: Report
) -> list[tuple[int, int, float]]:
    lengths = [n for k in range(20) if (n := SHORTEST * GROWTH**k) <= longest]
    points: list[tuple[int, int, float]] = []
    for number, length in enumerate(lengths):
        report(f"prompts of {length} tokens", 0.6 * number / len(lengths))
        took_ms = 0.0
        for cached in dict.fromkeys((0, length // 2 // block * block, length * 7 // 8 // block * block)):
            for _ in range(REPEATS):
                prompt = driver.fresh(length)
                if cached:
                    driver.run([[*prompt[:cached], FIRST_ID]], 1)
                ms = driver.prefill_ms(prompt)
                points.append((length - cached, length, ms))
                took_ms = max(took_ms, ms)
        if took_ms * GROWTH * 3 > case_s * 1e3:
            break
    return points


def _measure_steps(
    driver: Driver, longest: int, room: int, max_batch: int, *, case_s: float, report: Report
) -> list[tuple[int, int, float]]:
    batches = [n for k in range(12) if (n := 2**k) <= max_batch]
    points: list[tuple[int, int, float]] = []
    for place, context in enumerate(context for context in CONTEXTS if context <= longest):
        for number, batch in enumerate(batches):
            if batch * (context + 2 * NEW_TOKENS) > room:
                break
            report(f"{batch} decodes at {context} tokens", 0.6 + 0.13 * (place + number / len(batches)))
            began = time.perf_counter()
            times = driver.step_ms([driver.fresh(context) for _ in range(batch)])
            if times:
                points.append((batch, batch * (context + NEW_TOKENS // 2), statistics.median(times)))
            if (time.perf_counter() - began) * 2 > case_s:
                break
    return points


# ------------------------------------------------------------ where


def device_name(variant: Variant) -> str:
    """The GPU's or the CPU's model name."""
    devices = probe().devices if on_gpu(variant) else ()
    if devices:
        return devices[0].name
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def layout_of(variant: Variant, role: str) -> str:
    parallel = parallel_of(variant, role)
    return f"tp{parallel.tensor}pp{parallel.pipeline}"


def provenance_of(variant: Variant, weights_digest: str, role: str = "decode") -> Provenance:
    """Of a worker of the pool `role` on this machine; `measure` drives one of decode."""
    return Provenance(
        model=variant.weights,
        weights_digest=weights_digest,
        engine=variant.engine.kind,
        dtype=variant.engine.dtype,
        device=device_name(variant),
        version=__version__,
        date=datetime.now(UTC).date().isoformat(),
        parallel=layout_of(variant, role),
        threads=0 if on_gpu(variant) else variant.engine.threads,
    )


def _variant(args: argparse.Namespace) -> Variant:
    """The first variant of the configuration, or the one named; else one made of the options."""
    if args.config is None:
        engine = {"kind": args.engine, "dtype": args.dtype, "threads": args.threads, "device": args.device}
        if args.engine == "sim":
            engine["profile"] = args.sim_profile
        model = {"name": "profiled", "variants": [{"weights": args.weights, "engine": engine}]}
        return load_config({"models": [model]}).models[0].variants[0]
    plan = read_plan(find_config(args.config))
    found = [
        (f"{model.name}/{variant.name}", variant)
        for application in plan.applications
        for model in application.models
        for variant in model.variants
    ]
    for name, variant in found:
        if args.variant in (None, name):
            layouts = [layout_of(variant, role) for role in ROLES]
            if variant.prefill.replicas and layouts[0] != layouts[1]:
                raise StartError(
                    f"{name} has prefill workers of {layouts[0]}, decode workers of {layouts[1]}: no "
                    "profile holds for both; leave `times` out, and the models are learnt from requests"
                )
            return variant
    names = ", ".join(name for name, _ in found)
    raise StartError(f"--variant {args.variant!r} is not in {args.config}; there: {names}")


BY_CONFIG, BY_OPTIONS, SIMULATED = "--config", "a command without --config", "--engine sim"
WHAT = (
    Option("--config", str, None, "a configuration of `serve run`; its first variant is measured"),
    Option("--variant", str, None, "another one, as model/variant", BY_CONFIG),
    Option("--weights", str, "smollm2-135m", "a known name or a path", BY_OPTIONS),
    Option("--engine", ("torch", "sim", "tensorrt_llm"), "torch", "that computes", BY_OPTIONS),
    Option("--dtype", ("bfloat16", "float32", "float16"), "bfloat16", "of the weights", BY_OPTIONS),
    Option("--device", str, "cpu", "cpu, cuda or cuda:N", BY_OPTIONS),
    Option("--threads", Number(least=1, most=1024, whole=True), 1, "of the engine on a CPU", BY_OPTIONS),
    Option("--sim-profile", str, "h100-70b", "a name in configs/profiles or a .json file", SIMULATED),
)
HOW = (
    Option("--case-s", Number(above=0, most=3600), CASE_S, "leave out cases that take longer"),
    Option("--out", str, "profile", "writes OUT.json and OUT.png"),
)


def arguments(argv: Sequence[str] | None) -> tuple[OptionParser, argparse.Namespace]:
    """Exits with one line and code 2 on a mistake."""
    parser = OptionParser(prog="python -m planner.profile", description=(__doc__ or "").splitlines()[0])
    parser.table("what is measured", WHAT)
    parser.table("how", HOW)
    args = parser.parse_args(argv)
    parser.settle(
        args,
        lambda args: {
            BY_CONFIG: args.config is not None,
            BY_OPTIONS: args.config is None,
            SIMULATED: args.config is None and args.engine == "sim",
        },
    )
    return parser, args


def main(argv: Sequence[str] | None = None) -> int:
    parser, args = arguments(argv)
    parser.will_write("--out", args.out, (".json", ".png"))
    try:
        variant = _variant(args)
        with shown_progress("profile") as report:
            report("building the engine", 0.0)
            provenance = provenance_of(variant, model_digest(resolve_weights(variant.weights)))
            engine = build_engine(variant)
            prefill, step = measure(engine, variant.engine.max_batch, report, args.case_s)
            report("fitting", 1.0)
        profile = make_profile(provenance, prefill, step)
    except KVRelayError as error:
        return parser.failed(error.message)
    save_profile(profile, Path(f"{args.out}.json"))
    draw_fit(profile, Path(f"{args.out}.png"))
    times = profile.times
    print(f"T_prefill(u, ctx) = {_terms(times.prefill, ('', 'u', 'u (ctx - u/2)'))} ms", end="")
    print(f"   typical error {times.prefill_spread:.0%}")
    print(f"T_step(batch, kv) = {_terms(times.step, ('', 'batch', 'kv'))} ms", end="")
    print(f"   typical error {times.step_spread:.0%}")
    if max(times.prefill_spread, times.step_spread) > MOST_SPREAD:
        print("these times are too scattered to rely on: measure again on an idle machine")
    print(f"{args.out}.json and {args.out}.png written; name it as the variant's `times` to use it")
    return 0


def make_profile(
    provenance: Provenance,
    prefill: Sequence[tuple[int, int, float]],
    step: Sequence[tuple[int, int, float]],
) -> Profile:
    """Raises StartError when there is too little to fit."""
    if len(prefill) < 4 or len(step) < 3:
        raise StartError(
            f"only {len(prefill)} prompts and {len(step)} batches could be measured: "
            "give the engine more kv_bytes, or raise --case-s"
        )
    a, b = fit_prefill(prefill), fit_step(step)
    times = FittedTimes(
        a.coefficients, b.coefficients, a.spread, b.spread, samples=len(prefill) + len(step)
    )
    return Profile(provenance, times, tuple(prefill), tuple(step))


def _terms(coefficients: Sequence[float], names: Sequence[str]) -> str:
    return " + ".join(
        f"{k:.4g}{' ' + name if name else ''}" for k, name in zip(coefficients, names, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
