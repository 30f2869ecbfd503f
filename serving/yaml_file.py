"""YAML without surprises: a key that stands twice in a mapping is an error, where readers keep the last."""

from __future__ import annotations

from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> Any:
        node: Any = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:  # as written: merges (`<<`) come later
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value} stands here twice", key.start_mark
                    )
                seen.add((key.tag, key.value))
        return node


def load_yaml(text: str) -> Any:
    """Raises yaml.YAMLError, with a mark where that is known."""
    return yaml.load(text, Loader=_Loader)
