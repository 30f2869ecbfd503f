"""Pages that are written from the sources say what the sources say: `make map`."""

from __future__ import annotations

import msgspec

from serving.config import AppConfig
from tests import file_map, settings_page


def test_the_settings_page_is_of_this_config() -> None:
    assert settings_page.PAGE.read_text() == settings_page.page()


def test_the_map_is_of_these_files() -> None:
    assert file_map.PAGE.read_text() == file_map.HEAD + file_map.file_map()


def test_every_section_and_key_is_on_the_page() -> None:
    page = settings_page.page()
    for path, section in settings_page.sections(AppConfig, ""):
        assert not path or f"## `{path}`" in page
        assert all(f"| `{field.name}` |" in page for field in msgspec.structs.fields(section))
