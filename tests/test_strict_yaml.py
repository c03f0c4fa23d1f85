"""Values are those of PyYAML; a key that is written twice is an error that says where."""

from __future__ import annotations

import pytest
import yaml

from eagle3_utils import strict_yaml
from eagle3_utils.runs import repo_root


@pytest.mark.parametrize("path", sorted((repo_root() / "parameters").glob("*.yaml")), ids=lambda path: path.stem)
def test_parameters_are_read_as_by_pyyaml(path):
    assert strict_yaml.load(path.read_text()) == yaml.safe_load(path.read_text())


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3\n", "s: {x: 1, x: 1}\n", "- {y: [], z: 0, y: 1}\n"])
def test_a_key_that_is_written_twice_is_refused(text):
    with pytest.raises(yaml.YAMLError, match="is written twice"):
        strict_yaml.load(text)


def test_a_mapping_may_be_merged_into_another():
    text = "base: &base {x: 1, y: 2}\nshared:\n  <<: *base\n  y: 3\n"
    assert strict_yaml.load(text) == yaml.safe_load(text)
    assert strict_yaml.load(text)["shared"] == {"x": 1, "y": 3}


@pytest.mark.parametrize("text", ["[,a]", "{[1]: 2}", "!!python/object/apply:os.system ['true']"])
def test_what_pyyaml_refuses_is_refused(text):
    with pytest.raises(yaml.YAMLError):
        strict_yaml.load(text)
