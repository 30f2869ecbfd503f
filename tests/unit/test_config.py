"""Settings: what is accepted, and that every mistake is told by key, value and what is allowed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

import configs
from serving.config import AppConfig, load_config
from serving.errors import ConfigError
from serving.preflight import read_plan
from serving.sim_profile import load_profile

SHIPPED = Path(configs.__file__).parent


def args(**changes: Any) -> dict[str, Any]:
    """Valid args; `changes` maps dotted paths (`models.0.name`, dots as `__`) to new values."""
    value: dict[str, Any] = {
        "models": [{"name": "m", "variants": [{"weights": "w", "engine": {"kind": "torch"}}]}]
    }
    value = copy.deepcopy(value)
    for path, new in changes.items():
        *way, last = [int(step) if step.isdecimal() else step for step in path.split("__")]
        here: Any = value
        for step in way:
            here = here[step] if isinstance(step, int) else here.setdefault(step, {})
        if new is ...:
            del here[last]
        else:
            here[last] = new
    return value


V = "models__0__variants__0__"

BAD = {
    "unknown top key": (args(modls=1), ["unknown key modls", "did you mean models?", "frontend, router"]),
    "unknown key, no guess": (args(zzz=1), ["unknown key zzz; allowed here: models"]),
    "unknown nested key": (
        args(**{V + "engine__dtpe": 1}),
        ["models[0].variants[0].engine.dtpe", "did you mean dtype"],
    ),
    "unknown profile key": (
        args(**{V + "engine__profile": {"stepms": 1}}),
        ["engine.profile.stepms", "did you mean step_ms"],
    ),
    "missing models": (args(models=...), ["models is missing", "a list of at least 1"]),
    "missing weights": (args(**{V + "weights": ...}), ["models[0].variants[0].weights is missing", "text"]),
    "no models": (args(models=[]), ["models = []", "a list of at least 1"]),
    "mapping for list": (args(models={}), ["models = {}", "a list"]),
    "number for mapping": (args(**{V + "prefill": 3}), ["prefill = 3", "a mapping with the keys replicas"]),
    "unknown engine": (
        args(**{V + "engine__kind": "vllm"}),
        ["models[0].variants[0].engine.kind = 'vllm'", "allowed: torch, sim, tensorrt_llm"],
    ),
    "odd block size": (
        args(**{V + "engine__block_tokens": 33}),
        ["block_tokens = 33", "allowed: 8, 16, 32"],
    ),
    "text for number": (
        args(deadlines__request_ms="10s"),
        ["deadlines.request_ms = '10s'", "a number over 0"],
    ),
    "fraction for count": (
        args(**{V + "prefill__replicas": 1.5}),
        ["prefill.replicas = 1.5", "a whole number"],
    ),
    "null for count": (args(**{V + "prefill__replicas": None}), ["prefill.replicas = null"]),
    "negative": (args(**{V + "prefill__replicas": -1}), ["replicas = -1", "0 or more"]),
    "port too high": (args(link__port=70000), ["link.port = 70000", "from 0, up to 65535"]),
    "zero target": (args(models__0__slo__ttft_ms=0), ["slo.ttft_ms = 0", "over 0, up to 86400000"]),
    "percentile 100": (args(models__0__slo__percentile=100), ["percentile = 100", "below 100"]),
    "device": (args(**{V + "engine__device": "tpu"}), ["engine.device = 'tpu'", "cuda"]),
    "name with a space": (args(models__0__name="a b"), ["models[0].name = 'a b'", "matches"]),
    "label no text": (
        args(**{V + "decode__labels": {"zone": 1}}),
        ["decode.labels.zone = 1", "text"],
    ),
    "bare off": (args(planner__mode=False), ["planner.mode = false", "off", "in quotes"]),
    "tiny KV": (args(**{V + "engine__kv_bytes": 1}), ["engine.kv_bytes = 1", "65536 or more"]),
    "sim without profile": (args(**{V + "engine__kind": "sim"}), ["engine.profile is missing", "sim"]),
    "profile without sim": (args(**{V + "engine__profile": "zero"}), ["engine.profile", "'torch'"]),
    "chunk below block": (
        args(**{V + "engine__chunk_tokens": 8}),
        ["chunk_tokens = 8", "at least block_tokens (32)"],
    ),
    "min over max": (
        args(**{V + "decode__min_replicas": 9}),
        ["decode.min_replicas = 9", "max_replicas (4)"],
    ),
    "replicas over max": (
        args(**{V + "prefill__replicas": 9}),
        ["prefill.replicas = 9", "max_replicas (4)"],
    ),
    "no decode": (args(**{V + "decode__replicas": 0}), ["decode.replicas = 0", "1 or more"]),
    "model twice": (args(models=args()["models"] * 2), ["'m' is used twice"]),
    "in a mapping": (
        args(models__0__slo={"classes": {"ok": {}, "gold": {"itl_ms": -1}}}),
        ["models[0].slo.classes.gold.itl_ms = -1", "a number over 0"],
    ),
    "unknown key in a mapping": (
        args(models__0__slo={"classes": {"gold": {"itl": 1}}}),
        ["unknown key models[0].slo.classes.gold.itl", "did you mean itl_ms"],
    ),
    "in a mapping, under a key with dots": (
        args(models__0__slo={"classes": {"a.b": {"itl_ms": -1}}}),
        ["models[0].slo.classes[...].itl_ms = {'a.b'", "a number over 0"],
    ),
    "no mapping at all": ([1], ["args = [1]", "a mapping with the keys models"]),
    "empty file": (None, ["args = null", "models"]),
}


@pytest.mark.parametrize(("bad", "said"), BAD.values(), ids=BAD)
def test_a_mistake_is_told_by_key_value_and_what_is_allowed(bad: Any, said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(bad)
    message = caught.value.message
    assert "\n" not in message
    for part in said:
        assert part in message


def test_long_values_are_cut() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(args(frontend=["x" * 1000]))
    assert len(caught.value.message) < 350
    assert "x" * 100 not in caught.value.message


def test_defaults_are_whole() -> None:
    config = load_config(args())
    assert config.models[0].variants[0].decode.replicas == 1
    assert config.deadlines.request_ms == 600_000


def test_settings_cannot_change() -> None:
    config = load_config(args())
    with pytest.raises(AttributeError):
        config.frontend.max_inflight = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(path.name for path in SHIPPED.glob("*.yaml")))
def test_shipped_configurations_are_valid(name: str) -> None:
    plan = read_plan(SHIPPED / name)
    assert plan.applications
    for config in plan.applications:
        assert isinstance(config, AppConfig)


def test_the_quickstart_fits_a_machine_with_two_cores() -> None:
    plan = read_plan(SHIPPED / "quickstart.yaml")
    assert sum(pool.replicas * pool.cpus for _, pool in plan.pools()) <= 2


@pytest.mark.parametrize("path", sorted((SHIPPED / "profiles").glob("*.json")), ids=lambda path: path.stem)
def test_shipped_profiles_are_valid(path: Path) -> None:
    assert load_profile(path.stem) == load_profile(str(path))


NOT_PLANS = {
    "no yaml": ("a: [", ":1: not YAML"),
    "no mapping": ("- 1", "`applications`"),
    "no import path": ("applications: [{name: x}]", "applications[0].import_path"),
    "port": (
        "applications: []\nhttp_options: {port: '80'}",
        "http_options.port = '80'; allowed: 1 to 65535",
    ),
    "args": (
        yaml.safe_dump({"applications": [{"import_path": "serving.app:build", "args": {"x": 1}}]}),
        "unknown key x",
    ),
}


@pytest.mark.parametrize(("text", "said"), NOT_PLANS.values(), ids=NOT_PLANS)
def test_a_file_that_is_no_plan(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_plan(path)
    assert caught.value.message.startswith(str(path))
    assert said in caught.value.message
    assert "\n" not in caught.value.message
