import json
import os
import re
from collections import namedtuple
from types import SimpleNamespace

import nbformat
import pytest
import yaml
from fake_capture import make_records

from eagle3_utils.corpus.records import Record, write_parquet
from eagle3_utils.errors import UserError
from eagle3_utils.runner import notebook_path
from eagle3_utils.states import planner
from eagle3_utils.states.planner import plan, plan_from_parameters
from eagle3_utils.states.sizes import CorpusNumbers

KIMI = CorpusNumbers(num_samples=37_312, num_tokens=87_800_000, num_final_rows=43_900_000, longest=8192)
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def disk(monkeypatch):
    """Sets what the planner sees as free, everywhere."""

    def set_free(num_bytes):
        monkeypatch.setattr(planner.shutil, "disk_usage", lambda _: Usage(0, 0, num_bytes))

    return set_free


def test_what_does_not_fit_names_the_shortfall_and_what_would(tmp_path, disk):
    disk(3 * 2**40)
    result = plan(KIMI, 7168, 3, "bf16", "all", tmp_path, tmp_path, 0, tokens_per_second=(18_000, 30_000))
    assert not result.fits and result.shortfall_bytes == result.store_bytes - 3 * 2**40
    changes = [option["change"] for option in result.options]
    assert any(change.startswith("codec: fp8, final: supervised") for change in changes)
    assert not any(change.startswith("codec: bf16, final: supervised") for change in changes)  # 4.01 TiB
    samples = next(option["num_samples"] for option in result.options if "num_samples" in option)
    assert samples == pytest.approx(37_312 * 3 / 4.58, rel=0.01)
    with pytest.raises(UserError, match="short") as error:
        result.require()
    assert error.value.exit_code == 2


def test_another_disk_is_an_option_once_when_it_has_room_and_is_no_memory(tmp_path, disk, monkeypatch):
    disk(6 * 2**40)
    mounts = {"here": "ext4", "large": "nfs4", "large-again": "nfs4", "read-only": "ext4", "memory": "tmpfs"}
    for name in mounts:
        (tmp_path / name).mkdir()
    partitions = [
        SimpleNamespace(
            mountpoint=str(tmp_path / name), fstype=kind, opts="ro" if name == "read-only" else "rw,relatime"
        )
        for name, kind in mounts.items()
    ]
    monkeypatch.setattr(planner.psutil, "disk_partitions", lambda all: partitions)
    monkeypatch.setattr(planner, "_device", lambda folder: folder.name.split("-")[0])
    result = plan(KIMI, 7168, 3, "bf16", "all", tmp_path / "here", tmp_path, 64 << 30, min_free_bytes=2 * 2**40)
    assert not result.fits, "4.58 TiB and 2 TiB to stay free"
    assert not any("data_root" in option["change"] for option in result.options), "a disk without that room"
    monkeypatch.setattr(planner, "_free_bytes", lambda path: (1 if path.name == "here" else 8) * 2**40)
    result = plan(KIMI, 7168, 3, "bf16", "all", tmp_path / "here", tmp_path, 64 << 30, min_free_bytes=2 * 2**40)
    disks = [option["change"] for option in result.options if "data_root" in option["change"]]
    assert disks == [f"data_root under {tmp_path / 'large'} (8.00 TiB free)"]


def test_hours_come_from_the_rate_range(tmp_path, disk):
    disk(2**50)
    result = plan(KIMI, 7168, 3, "bf16", "all", tmp_path, tmp_path, 64 << 30, tokens_per_second=(18_000, 30_000))
    assert result.fits and result.hours == pytest.approx((0.813, 1.355), abs=0.001)
    assert result.num_shards == -(-result.store_bytes // (2 << 30))
    little_staging = plan(KIMI, 7168, 3, "bf16", "all", tmp_path, tmp_path, 4 << 30)
    assert little_staging.num_shards == pytest.approx(result.store_bytes / (4 * 2**30 / 6), rel=0.01), "closed early"
    assert "0.8 to 1.4 h" in result.text() and json.dumps(result.to_json())
    slow = plan(KIMI, 7168, 3, "bf16", "all", tmp_path, tmp_path, 4 << 30, tokens_per_second=(340, 340))
    assert slow.hours[0] == pytest.approx(71.7, abs=0.1)  # the reference run's 72 h


def test_staging_must_hold_the_longest_sample_five_times(tmp_path, disk):
    disk(2**50)
    result = plan(KIMI, 7168, 3, "bf16", "all", tmp_path, tmp_path, 1 << 30)
    assert result.staging_needed_bytes == 5 * 8192 * (57_344 + 8)
    eight = plan(KIMI, 7168, 3, "bf16", "all", tmp_path, tmp_path, 4 << 30, num_writers=8)
    assert eight.staging_needed_bytes == 8 * result.staging_needed_bytes and not eight.fits, "each has an eighth of it"
    assert not result.fits and "staging" in result.problems[0] and result.hours is None


def test_what_is_stored_already_need_not_fit_again(tmp_path, disk):
    (tmp_path / "train").mkdir()
    with open(tmp_path / "train" / "shard-000000.h5", "wb") as file:
        os.truncate(file.fileno(), 4 * 2**40)
    disk(2**40)
    result = plan(KIMI, 7168, 3, "bf16", "all", tmp_path, tmp_path, 4 << 30, tokens_per_second=(340, 340))
    assert result.fits and result.stored_bytes == 4 * 2**40
    assert result.hours[0] == pytest.approx(71.7 * (1 - 4 * 2**40 / result.store_bytes), abs=0.1)


def write_parameters(folder, stage=None, **shared):
    path = folder / "parameters.yaml"
    path.write_text(yaml.safe_dump({"shared": shared, "03_extract_hidden_states": stage or {}}))
    return path


def test_planned_numbers_stand_in_for_model_and_corpus(tmp_path, disk):
    disk(2**50)
    planned = {
        "hidden_size": 7168,
        "num_samples": 37_312,
        "num_tokens": 87_800_000,
        "supervised_share": 0.5,
        "longest": 8192,
        "slowest_tokens_per_second": 18_000,
        "fastest_tokens_per_second": 30_000,
    }
    path = write_parameters(
        tmp_path, {"planned": planned, "final": "all"}, run_dir=str(tmp_path / "run"), model="moonshotai/Kimi-K2.5"
    )
    result = plan_from_parameters(path)
    assert result.store_bytes / 2**40 == pytest.approx(4.58, abs=0.01)
    assert result.hours[1] == pytest.approx(1.355, abs=0.001)
    disk(2**40)
    assert not plan_from_parameters(path).fits
    assert plan_from_parameters(path, ["03.codec=fp8"]).store_bytes < 0.6 * result.store_bytes


def test_missing_or_unknown_planned_numbers_are_named(tmp_path, disk):
    disk(2**50)
    path = write_parameters(tmp_path, run_dir=str(tmp_path / "run"), model="some/model")
    with pytest.raises(UserError, match=r"planned\.num_samples"):
        plan_from_parameters(path)
    path = write_parameters(tmp_path, {"planned": {"tokens": 5}}, run_dir=str(tmp_path / "run"))
    with pytest.raises(UserError, match="unknown key 'tokens'"):
        plan_from_parameters(path)


def test_a_corpus_and_a_pilot_on_disk_are_used(tmp_path, disk):
    disk(2**50)
    records = [Record(r.id, r.source, r.input_ids, r.loss_mask) for r in make_records(30)]
    (tmp_path / "data" / "corpus").mkdir(parents=True)
    write_parquet(records[:20], tmp_path / "data" / "corpus" / "train.parquet")
    write_parquet(records[20:], tmp_path / "data" / "corpus" / "val.parquet")
    (tmp_path / "02_patch_and_probe").mkdir()
    rates = {"tokens_per_second": 1000.0, "tokens_per_second_low": 800.0, "tokens_per_second_high": 1100.0}
    (tmp_path / "02_patch_and_probe" / "probe.json").write_text(json.dumps({"pilot": rates}))
    path = write_parameters(tmp_path, {"planned": {"hidden_size": 16}}, run_dir=str(tmp_path), model="some/model")
    result = plan_from_parameters(path)
    assert (result.num_samples, result.num_tokens) == (30, sum(len(record.input_ids) for record in records))
    assert result.tokens_per_second == (800.0, 1100.0)


def test_notebook_03_asks_the_plan_before_a_server_starts_and_plan_and_codec_before_it_extracts():
    cells = nbformat.read(notebook_path("03_extract_hidden_states"), as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    first, second = (match.start() for match in re.finditer(r"^plan\.require\(\)$", code, re.M))
    codec = code.index("piloted.codecs[config.codec].require(")
    assert first < code.index("open_servers(config") < codec < second < code.index("extract.extract(")
