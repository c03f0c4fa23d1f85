import errno
import threading
from functools import partial

import numpy as np
import pytest
import torch
from fake_capture import SMALL_SHARD, fill, make_records, sample_of, store_meta

from eagle3_utils.errors import UserError
from eagle3_utils.states import store as store_module
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.shards import shard as shard_module
from eagle3_utils.states.shards.ledger import Ledger
from eagle3_utils.states.shards.sample import StagedSample, UnfitSample
from eagle3_utils.states.shards.verify import verify_store
from eagle3_utils.states.store import StoreWriter


@pytest.fixture
def records():
    return make_records(60)


@pytest.mark.parametrize("final", ["all", "supervised"])
@pytest.mark.parametrize("codec", ["bf16", "fp8"])
def test_what_goes_in_comes_out(tmp_path, records, codec, final):
    fill(tmp_path, records, codec=codec, final=final)
    reader = StoreReader(tmp_path)
    assert reader.ids == sorted(record.id for record in records)
    assert len(list(tmp_path.glob("shard-*.h5"))) > 1
    for record in records:
        got, want = reader.read(reader.index_of(record.id)), sample_of(record)
        assert got.input_ids.tolist() == record.input_ids and got.loss_mask.tolist() == record.loss_mask
        assert got.source == record.source
        rows = np.ones(len(record.input_ids), bool)
        if final == "supervised":
            rows = np.array([*record.loss_mask[1:], 0], bool)
        assert got.final_rows.tolist() == rows.tolist()
        if codec == "bf16":
            assert torch.equal(got.aux, want.aux) and torch.equal(got.final, want.final[torch.from_numpy(rows)])
        else:
            assert (got.aux.float() - want.aux.float()).norm() < 0.04 * want.aux.float().norm()
    assert verify_store(tmp_path, deep=True).ok


def test_a_store_of_another_model_is_refused(tmp_path, records):
    fill(tmp_path, records)
    with pytest.raises(UserError, match="fingerprint"):
        StoreWriter(tmp_path, store_meta(fingerprint="g"))
    with pytest.raises(UserError, match="codec"):
        StoreWriter(tmp_path, store_meta(codec="fp8"))


def test_one_writer_at_a_time(tmp_path):
    with StoreWriter(tmp_path, store_meta()), pytest.raises(UserError, match="another process"):
        StoreWriter(tmp_path, store_meta())


def test_bad_samples_are_refused_by_name(tmp_path, records):
    broken = sample_of(records[0])
    broken.aux[1, 0, 0] = float("inf")
    short = sample_of(records[1])
    short.aux = short.aux[:-1]
    with StoreWriter(tmp_path, store_meta()) as writer:
        with pytest.raises(ValueError, match=f"{records[0].id}: aux has 1 values"):
            writer.add(broken)
        with pytest.raises(ValueError, match="expected bfloat16"):
            writer.add(short)
        writer.add(sample_of(records[2]))
        with pytest.raises(ValueError, match="already in the store"):
            writer.add(sample_of(records[2]))


def staged(record, folder, settle=lambda problem: None, load=None) -> StagedSample:
    """A record whose states are in a file (here only said to be)."""
    path, sample = folder / f"{record.id}.staged", sample_of(record)
    path.write_text("states")
    return StagedSample(record.id, path, 25, sample.stored_bytes(store_meta()), load or (lambda meta: sample), settle)


def test_staged_files_go_after_the_ledger_commit(tmp_path, records):
    seen = []

    def settle(problem):
        with Ledger(tmp_path / "ledger.sqlite", read_only=True) as ledger:
            here = (tmp_path / "shard-000000.h5").exists(), list(tmp_path.glob("*.staged"))
            seen.append((problem, ledger.counts()["done"], *here))

    with StoreWriter(tmp_path, store_meta()) as writer:
        for record in records[:3]:
            writer.add_staged(staged(record, tmp_path, settle))
        assert seen == [] and writer.held_bytes == 75 and len(list(tmp_path.glob("*.staged"))) == 3
    assert seen == [(None, 3, True, [])] * 3 and writer.held_bytes == 0


def test_what_is_wrong_with_a_staged_sample_is_told_and_it_may_come_again(tmp_path, records):
    told = {}

    def unfit(meta):
        raise UnfitSample("no good")

    with StoreWriter(tmp_path, store_meta()) as writer:
        for record, load in zip(records[:2], (unfit, None), strict=True):
            writer.add_staged(staged(record, tmp_path, partial(told.__setitem__, record.id), load))
        writer.flush()
        assert told == {records[0].id: "no good", records[1].id: None} and not list(tmp_path.glob("*.staged"))
        writer.add_staged(staged(records[0], tmp_path))
        with pytest.raises(ValueError, match="already in the store"):
            writer.add_staged(staged(records[1], tmp_path))
    assert StoreReader(tmp_path).ids == sorted(record.id for record in records[:2])


def test_held_bytes_close_a_shard_early(tmp_path, records):
    with StoreWriter(tmp_path, store_meta(), max_held_bytes=100) as writer:
        for record in records[:10]:
            writer.add_staged(staged(record, tmp_path))
    assert len(list(tmp_path.glob("shard-*.h5"))) == 3  # 4 + 4 + 2 samples


def test_resume_keeps_finished_shards_untouched(tmp_path, records):
    fill(tmp_path, records[:30])
    before = {path.name: path.read_bytes() for path in tmp_path.glob("shard-*.h5")}
    with StoreWriter(tmp_path, store_meta(), SMALL_SHARD) as writer:
        missing = writer.register(records)
        assert [record.id for record in missing] == [record.id for record in records[30:]]
        for record in missing:
            writer.add(sample_of(record))
    for name, content in before.items():
        assert (tmp_path / name).read_bytes() == content
    assert len(StoreReader(tmp_path)) == 60 and verify_store(tmp_path, deep=True).ok


def test_disk_full_stops_with_whole_shards_only(tmp_path, records, monkeypatch):
    fill(tmp_path, records[:20])

    def no_space(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_module.os, "pwrite", no_space)
    with pytest.raises(UserError, match="disk full"):
        fill(tmp_path, records[20:])
    monkeypatch.undo()
    assert not list(tmp_path.glob("*.tmp")) and len(StoreReader(tmp_path)) == 20
    fill(tmp_path, records[20:])
    assert len(StoreReader(tmp_path)) == 60 and verify_store(tmp_path, deep=True).ok


def test_two_shards_are_written_at_a_time(tmp_path, records, monkeypatch):
    together, write = threading.Barrier(2, timeout=20), store_module.build_shard

    def write_when_both_are_there(path, *rest):
        if path.name in ("shard-000000.h5", "shard-000001.h5"):
            together.wait()
        return write(path, *rest)

    monkeypatch.setattr(store_module, "build_shard", write_when_both_are_there)
    fill(tmp_path, records)
    assert len(StoreReader(tmp_path)) == 60 and verify_store(tmp_path, deep=True).ok


def test_a_shard_that_fails_beside_another_loses_only_its_own_samples(tmp_path, records, monkeypatch):
    write = store_module.build_shard

    def fail_once(path, *rest):
        if path.name == "shard-000001.h5":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *rest)

    monkeypatch.setattr(store_module, "build_shard", fail_once)
    with pytest.raises(UserError, match="disk full"):
        fill(tmp_path, records)
    monkeypatch.undo()
    stored = StoreReader(tmp_path).ids
    with StoreWriter(tmp_path, store_meta(), SMALL_SHARD) as writer:
        missing = writer.register(records)
        assert {record.id for record in missing} == {record.id for record in records} - set(stored) != set()
        for record in missing:
            writer.add(sample_of(record))
    assert len(StoreReader(tmp_path)) == 60 and verify_store(tmp_path, deep=True).ok


def test_an_error_inside_the_with_block_writes_nothing_more(tmp_path, records):
    with pytest.raises(RuntimeError), StoreWriter(tmp_path, store_meta()) as writer:
        writer.add(sample_of(records[0]))
        raise RuntimeError("interrupted")
    assert not list(tmp_path.glob("shard-*"))
