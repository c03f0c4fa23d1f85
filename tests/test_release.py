"""`eagle3 export`: the run's draft with its card, and nobody's folder overwritten."""

from __future__ import annotations

import json

import pytest
from test_card import CONFIG, DONE

from eagle3_utils.draft.release import draft_folder, export_run
from eagle3_utils.errors import UserError
from eagle3_utils.runs import hash_files, write_json


@pytest.fixture
def run(tmp_path):
    """A run whose training is done, with files of a draft."""
    folder = tmp_path / "run"
    export = folder / "data" / "draft" / "export"
    write_json(export / "config.json", CONFIG)
    (export / "model.safetensors").write_bytes(b"weights")
    made = hash_files([export / "config.json", export / "model.safetensors"])
    write_json(
        folder / "04_train_draft" / "DONE.json", DONE | {"outputs": {"draft": made}, "data": str(folder / "data")}
    )
    return folder


def test_export_copies_the_draft_with_its_card_and_replaces_an_older_one(run, tmp_path):
    out = tmp_path / "out"
    for _ in range(2):
        assert export_run(run, out) == out
        assert sorted(path.name for path in out.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert json.loads((out / "config.json").read_text()) == CONFIG
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_folder_with_something_else_in_it_is_left_alone(run, tmp_path):
    out = tmp_path / "thesis"
    out.mkdir()
    (out / "chapter1.tex").write_text("precious")
    with pytest.raises(UserError, match="no draft of ours"):
        export_run(run, out)
    assert (out / "chapter1.tex").read_text() == "precious"


def test_without_a_draft_or_with_another_one_export_refuses(run, tmp_path):
    weights = draft_folder(run) / "model.safetensors"
    weights.write_bytes(b"other weights")
    with pytest.raises(UserError, match="not the one that training made"):
        export_run(run, tmp_path / "out")
    weights.unlink()
    assert draft_folder(run) is None
    with pytest.raises(UserError, match="there is no draft"):
        export_run(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
