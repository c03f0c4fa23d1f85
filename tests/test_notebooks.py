"""The notebooks: their parameters cell is the stage's model, their form is the same in all of them."""

from __future__ import annotations

import ast
import itertools

import nbformat
import pytest

from eagle3_utils.config import STAGES
from eagle3_utils.runner import notebook_parameters, notebook_path


@pytest.fixture(params=list(STAGES))
def stage(request) -> str:
    return request.param


def read(stage: str):
    return nbformat.read(notebook_path(stage), as_version=4)


def parameters_source(stage: str) -> str:
    cells = [cell for cell in read(stage).cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(cells) == 1
    return cells[0].source


def test_parameters_cell_has_the_models_fields_with_their_defaults(stage):
    namespace: dict = {}
    exec(parameters_source(stage), namespace)
    found = {name: value for name, value in namespace.items() if not name.startswith("__")}
    model = STAGES[stage]
    assert found == model().model_dump(), "same names and same defaults"
    assert model.from_notebook(namespace) == model()


def test_every_parameter_is_annotated_and_commented(stage):
    source = parameters_source(stage)
    assert notebook_parameters(notebook_path(stage)) == set(STAGES[stage].model_fields)
    lines = source.splitlines()
    for node in ast.parse(source).body:
        assert "#" in lines[node.end_lineno - 1], f"{node.target.id} has no comment"


def test_committed_without_outputs_and_with_short_cells(stage):
    for cell in read(stage).cells:
        if cell.cell_type != "code":
            continue
        assert not cell.outputs and cell.execution_count is None
        if "parameters" not in cell.metadata.get("tags", []):
            assert len(cell.source.splitlines()) <= 15, cell.source


def test_prose_comes_first_and_before_every_code_cell(stage):
    cells = read(stage).cells
    assert cells[0].cell_type == "markdown"
    for before, cell in itertools.pairwise(cells):
        if cell.cell_type == "code" and "parameters" not in cell.metadata.get("tags", []):
            assert before.cell_type == "markdown" or "parameters" in before.metadata.get("tags", []), cell.source


def test_notebooks_define_no_classes_and_end_the_stage(stage):
    code = "\n".join(cell.source for cell in read(stage).cells if cell.cell_type == "code")
    assert "\nclass " not in code
    assert ".finish(" in code
