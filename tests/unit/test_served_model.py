"""What the frontend reads from a weights' directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serving.errors import StartError
from serving.served_model import load_served_model, read_chat_template, read_eos_ids
from tests.tiny_tokenizer import tiny_tokenizer


def write(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def with_tokenizer(directory: Path) -> Path:
    (directory / "tokenizer.json").write_text(tiny_tokenizer().source_json())
    return directory


def test_every_eos_id_of_both_files(tmp_path: Path) -> None:
    write(tmp_path, config={"eos_token_id": 2}, generation_config={"eos_token_id": [2, 7]})
    assert read_eos_ids(tmp_path) == {2, 7}


def test_no_eos_is_none_known(tmp_path: Path) -> None:
    assert read_eos_ids(tmp_path) == frozenset()


@pytest.mark.parametrize(("limit", "context"), [(None, 512), (100, 100), (1000, 512)])
def test_the_context_is_the_smaller_limit(tmp_path: Path, limit: int | None, context: int) -> None:
    write(with_tokenizer(tmp_path), config={"max_position_embeddings": 512})
    assert load_served_model("m", tmp_path, context_tokens=limit).context_tokens == context


def test_no_limit_at_all_is_a_start_error(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="max_position_embeddings"):
        load_served_model("m", with_tokenizer(tmp_path))


def test_a_file_that_is_no_json_is_a_start_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(StartError, match=r"config\.json"):
        load_served_model("m", with_tokenizer(tmp_path))


@pytest.mark.parametrize(
    "template",
    [
        "{{ eos_token }}",
        [{"name": "rag", "template": "x"}, {"name": "default", "template": "{{ eos_token }}"}],
    ],
    ids=["one", "several"],
)
def test_the_template_of_the_tokenizer_config(tmp_path: Path, template: Any) -> None:
    write(tmp_path, tokenizer_config={"chat_template": template, "eos_token": {"content": "</s>"}})
    found = read_chat_template(tmp_path)
    assert found is not None
    assert found.render([]) == "</s>"


def test_the_template_file_wins(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"chat_template": "x"})
    (tmp_path / "chat_template.jinja").write_text("y")
    found = read_chat_template(tmp_path)
    assert found is not None
    assert found.render([]) == "y"


def test_no_template_is_no_chat(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) is None
