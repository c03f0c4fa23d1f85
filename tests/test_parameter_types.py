"""Parameters with a rule of their own: draft trees, and a switch that YAML reads as a boolean."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import yaml

from eagle3_utils.acceptance.tree import TreeShape
from eagle3_utils.config import EvaluateConfig
from eagle3_utils.errors import UserError
from eagle3_utils.parameter_types import tree_problem


@pytest.mark.parametrize(
    "numbers, problem",
    [
        ((3,), None),
        ((3, 1, 4), None),
        ((2, 2, 7), None),  # 2 + 4 candidates and the root
        ((2, 2, 8), "num_draft_tokens 8: this tree has 2 to 7, the root counted"),
        ((3, 1, 9), "topk 1 is a chain: num_draft_tokens must be num_steps + 1 = 4"),
        ((0, 1, 1), "num_steps and topk must be at least 1, not 0 and 1"),
        ((3, -1, 4), "num_steps and topk must be at least 1, not 3 and -1"),
    ],
)
def test_a_tree_that_cannot_be_is_explained(numbers, problem):
    assert tree_problem(*numbers) == problem


def test_the_rule_is_the_one_of_the_trees_that_are_grown():
    for numbers in itertools.product(range(4), range(4), range(12)):
        try:
            TreeShape(*numbers)
        except UserError as error:
            assert tree_problem(*numbers) == error.what
        else:
            assert tree_problem(*numbers) is None


@pytest.mark.parametrize(
    "values, message",
    [
        ({"served_shapes": [[3, 1, 4], [3, 1, 9]]}, r"served_shapes\.1 = \[3, 1, 9\]: topk 1 is a chain"),
        ({"replay_shapes": [[]]}, r"replay_shapes\.0 = \[\]: write \[num_steps, topk, num_draft_tokens\]"),
        ({"replay_shapes": [[3, 1, 4, 1]]}, r"replay_shapes\.0 = .*: write \[num_steps"),
        ({"replay_shapes": [[0, 1, 1]]}, r"replay_shapes\.0 = .*at least 1, not 0"),
        ({"num_steps": 3, "num_draft_tokens": 9}, "num_draft_tokens = 9: topk 1 is a chain"),
        ({"num_steps": 2, "topk": 2, "num_draft_tokens": 1}, "num_draft_tokens = 1: .*has 2 to 7"),
        ({"num_steps": 0, "num_draft_tokens": 4}, "num_steps = 0: input should be greater than or equal to 1"),
        ({"served_concurrency": []}, "served_concurrency = .*at least 1 item"),
        ({"served_concurrency": [8, 0]}, r"served_concurrency\.1 = 0: input should be greater than or equal to 1"),
    ],
)
def test_what_only_serving_would_find_out_is_refused_with_the_parameters(values, message):
    with pytest.raises(UserError, match=message) as caught:
        EvaluateConfig.parse(values)
    assert caught.value.exit_code == 2


def test_trees_that_can_be_are_taken_as_they_are():
    values = {"served_shapes": [[3, 4, 8], [5]], "replay_shapes": [], "topk": 4, "num_draft_tokens": 8}
    config = EvaluateConfig.parse(values)
    assert {name: getattr(config, name) for name in values} == values


@pytest.mark.parametrize("written, meant", [("off", "off"), ("on", "on"), ("auto", "auto"), ("'off'", "off")])
def test_a_switch_may_be_written_without_quotes(written, meant):
    assert EvaluateConfig.parse(yaml.safe_load(f"served: {written}")).served == meant


@pytest.mark.parametrize("value", [0, "maybe", None, []])
def test_a_switch_is_nothing_else(value):
    with pytest.raises(UserError, match=r"served = .*input should be 'auto', 'on' or 'off'"):
        EvaluateConfig.parse({"served": value})


def test_parameters_are_checked_without_loading_torch():
    code = "import sys, eagle3_utils.config; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
