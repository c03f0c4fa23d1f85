"""What to capture, and where: layers checked, dumps in a folder of the run's own."""

from __future__ import annotations

import pytest

from eagle3_utils.config import ProbeConfig
from eagle3_utils.errors import UserError
from eagle3_utils.serving.spec import CaptureSpec, capture_spec
from eagle3_utils.target import load_target


@pytest.fixture(scope="module")
def target(example_target):
    return load_target(str(example_target))


def test_the_default_layers_are_early_middle_and_late_as_boundaries(target):
    spec = capture_spec(ProbeConfig(), target)
    assert spec.aux_layers == [1, 14, 26] and spec.boundaries == [2, 15, 27]
    assert CaptureSpec([2, 30, 58], spec.dump_dir).boundaries == [3, 31, 59]


@pytest.mark.parametrize("layers", [[5, 3], [3, 3], [-1, 4], [4, 30], [4, 29]])
def test_layers_that_do_not_rise_or_do_not_exist_are_refused(target, layers):
    with pytest.raises(UserError, match=r"must rise and lie in 0…28"):
        capture_spec(ProbeConfig(aux_layers=layers), target)


def test_runs_and_stages_do_not_share_a_dump_folder(target, tmp_path):
    folders = {
        capture_spec(ProbeConfig(run_dir=str(tmp_path / run), staging_dir=str(tmp_path)), target, name).dump_dir
        for run in ("one", "two")
        for name in ("probe", "dumps")
    }
    assert len(folders) == 4 and {folder.parent for folder in folders} == {tmp_path}
