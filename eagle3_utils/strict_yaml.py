"""YAML that says each thing once: a key written twice is an error, where PyYAML lets the last one win."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class _UniqueKeys(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *base`, whose keys others may say anew
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):  # the base class refuses others
                if key in seen:
                    problem = f"{key!r} is written twice"
                    raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)


def load(text: str) -> Any:
    """What `yaml.safe_load` gives. Raises `yaml.YAMLError` for broken YAML and for a key that is written twice."""
    return yaml.load(text, Loader=_UniqueKeys)  # noqa: S506 (it is a SafeLoader)
