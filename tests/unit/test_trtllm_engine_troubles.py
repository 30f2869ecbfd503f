"""Errors, crashes and placement, as users of TensorRT-LLM reported them, replayed on the fake.

Each test has the report's number, as in test_trtllm_transfer_troubles.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serving.config import Parallel, load_config
from serving.engine.base import AttemptId, EngineDied, Mode
from serving.engine.trtllm.placement import reserved
from serving.errors import ConfigError
from tests.unit.trtllm_rig import prompt, running, versions, work

# ---------------------------------------------------------------- errors


@versions
def test_13119_a_requests_own_error_ends_that_request(version: str, tmp_path: Path) -> None:
    with running(version, tmp_path, fake={"step_ms": 1}) as heard:
        heard.machine.knobs.request_errors = 1
        heard.engine.submit(work(1, prompt(20), max_tokens=20))
        heard.engine.submit(work(2, prompt(21), max_tokens=20))
        heard.until(lambda: heard.failure(1) and heard.reason(2))
        assert heard.failure(1) == ("the request's own fault", False)
        assert len(heard.tokens(2)) == 20
        assert heard.engine.died is None


@versions
@pytest.mark.parametrize("how", ["raises", "fatal_flag", "refuses"])
def test_12909_a_crash_inside_is_the_engines_end(
    version: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accounting error kills its executor; iterators may hang, so the flag is looked at."""
    monkeypatch.setattr("serving.engine.trtllm.engine.LOOK_S", 0.05)
    with running(version, tmp_path, fake={"step_ms": 1}) as heard:
        heard.engine.submit(work(1, prompt(20), max_tokens=500))
        heard.engine.submit(work(2, prompt(21), Mode.DECODE))
        heard.until(lambda: heard.tokens(1))
        error = RuntimeError("Assertion failed: reused blocks")
        if how == "raises":
            (request,) = heard.machine._running
            from tests.fake_trtllm.requests import Response

            request.output._push(Response(error=error))
        elif how == "fatal_flag":
            heard.machine.die(error)
        else:
            heard.machine.stopped = True
            heard.engine.submit(work(3, prompt(22)))
        heard.until(lambda: heard.engine.died)
        heard.until(lambda: heard.failure(1) and heard.failure(2))
        assert [heard.failure(n)[1] for n in (1, 2)] == [True, True]  # type: ignore[index]
        with pytest.raises(EngineDied):
            heard.engine.submit(work(4, prompt(20)))
        heard.engine.stop()
        assert not heard.machine.shut_down_when_fatal  # its own shutdown may hang: nobody calls it


@versions
@pytest.mark.parametrize("how", ["cancelled", "timed_out"])
def test_an_end_that_nobody_asked_for_goes_elsewhere(version: str, how: str, tmp_path: Path) -> None:
    with running(version, tmp_path) as heard:
        setattr(heard.machine.knobs, how, 1)
        heard.engine.submit(work(1, prompt(20)))
        heard.until(lambda: heard.failure(1))
        failure = heard.failure(1)
        assert failure is not None
        assert failure[1]


@versions
def test_10810_an_abort_with_logprobs(version: str, tmp_path: Path) -> None:
    with running(version, tmp_path, fake={"step_ms": 1}) as heard:
        heard.engine.submit(work(1, prompt(20), max_tokens=500, logprobs=3))
        heard.until(lambda: len(heard.tokens(1)) > 5)
        heard.engine.cancel(AttemptId(1))
        heard.until(lambda: not heard.machine._running)
        assert len(heard.local(2, prompt(20), logprobs=3)) == 6


# ---------------------------------------------------------------- placement


def test_6507_unequal_layouts_need_a_comparison_first() -> None:
    """TP2 to TP1 gave wrong text on A100: a pair of layouts is allowed by name."""

    def args(pairs: list[str]) -> dict[str, Any]:
        engine = {"kind": "tensorrt_llm", "trtllm": {"topology_pairs": pairs}}
        variant = {
            "weights": "w",
            "engine": engine,
            "prefill": {"gpus": 2, "parallel": {"tensor": 2}},
            "decode": {"gpus": 1},
        }
        return {"models": [{"name": "m", "variants": [variant]}]}

    with pytest.raises(ConfigError, match="tp2pp1>tp1pp1"):
        load_config(args([]))
    with pytest.raises(ConfigError, match="allowed: prefill>decode"):
        load_config(args(["2 to 1"]))
    assert load_config(args(["tp2pp1>tp1pp1"]))


def test_10038_10235_gpus_are_given_by_ray_alone() -> None:
    """Nothing of ours sets CUDA_VISIBLE_DEVICES; a replica reserves what its engine uses."""
    source = Path(__file__).parents[2] / "serving" / "engine" / "trtllm"
    text = "".join(path.read_text() for path in source.glob("*.py"))
    assert "CUDA_VISIBLE_DEVICES" not in text
    config = load_config(
        {
            "models": [
                {
                    "name": "m",
                    "variants": [
                        {
                            "weights": "w",
                            "engine": {"kind": "tensorrt_llm"},
                            "parallel": {"tensor": 4},
                            "prefill": {"gpus": 4},
                            "decode": {"gpus": 4},
                        }
                    ],
                }
            ]
        }
    )
    pool = config.models[0].variants[0].decode
    assert reserved(pool, Parallel(4), "mpi")[0]["num_gpus"] == 4
    with pytest.raises(ConfigError, match=r"decode\.gpus = 1; allowed: 2"):
        load_config(
            {
                "models": [
                    {
                        "name": "m",
                        "variants": [
                            {
                                "weights": "w",
                                "engine": {"kind": "tensorrt_llm"},
                                "parallel": {"tensor": 2},
                                "prefill": {"gpus": 2},
                                "decode": {"gpus": 1},
                            }
                        ],
                    }
                ]
            }
        )
