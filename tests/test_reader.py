import pickle

import psutil
import pytest
import torch
from fake_capture import fill, make_records

from eagle3_utils.errors import UserError
from eagle3_utils.states import reader as reader_module
from eagle3_utils.states.reader import Shard, StoreReader


@pytest.fixture
def records():
    return make_records(60)


def test_content_hash_does_not_depend_on_the_order(tmp_path, records):
    fill(tmp_path / "a", records)
    fill(tmp_path / "b", records[::-1])
    assert StoreReader(tmp_path / "a").content_hash() == StoreReader(tmp_path / "b").content_hash()
    fill(tmp_path / "c", records[:-1])
    assert StoreReader(tmp_path / "c").content_hash() != StoreReader(tmp_path / "a").content_hash()


def test_several_stores_read_as_one_and_a_double_is_named(tmp_path, records):
    fill(tmp_path / "a", records[:30])
    fill(tmp_path / "b", records[30:], codec="fp8")
    both = StoreReader([tmp_path / "a", tmp_path / "b"])
    assert both.ids == sorted(record.id for record in records)
    assert both.read(both.index_of(records[3].id)).input_ids.tolist() == records[3].input_ids
    fill(tmp_path / "c", records[29:31])
    with pytest.raises(UserError, match=records[29].id):
        StoreReader([tmp_path / "a", tmp_path / "c"])
    fill(tmp_path / "d", records[40:41], fingerprint="another model")
    with pytest.raises(UserError, match="fingerprint"):
        StoreReader([tmp_path / "a", tmp_path / "d"])


def test_a_split_of_several_runs_is_one_dataset(tmp_path, records):
    for number, run in enumerate(("a", "b", "c")):
        fill(tmp_path / run / "hidden_states" / "val", records[number * 20 : (number + 1) * 20])
    more = [str(tmp_path / "b"), str(tmp_path / "c")]
    assert StoreReader.of_split("val", tmp_path / "a", more).ids == sorted(record.id for record in records)
    assert len(StoreReader.of_split("val", tmp_path / "b")) == 20


def test_reader_survives_pickling(tmp_path, records):
    fill(tmp_path, records)
    reader = StoreReader(tmp_path)
    reader.read(0)
    copy = pickle.loads(pickle.dumps(reader))  # noqa: S301 our own bytes: what a worker process gets
    assert torch.equal(copy.read(7).aux, reader.read(7).aux)


def test_not_a_store_says_so(tmp_path):
    with pytest.raises(UserError, match=r"store\.json is missing"):
        StoreReader(tmp_path)


def test_of_many_shards_few_are_open_and_no_header_is_read_twice(tmp_path, records, monkeypatch):
    parsed = []
    monkeypatch.setattr(reader_module, "MAX_OPEN_SHARDS", 2)
    monkeypatch.setattr(reader_module, "Shard", lambda path: parsed.append(path.name) or Shard(path))
    fill(tmp_path, records)
    everything, reader = StoreReader(tmp_path), StoreReader(tmp_path)
    wanted = {index: everything.read(index).aux.clone() for index in everything.in_stored_order()}
    parsed.clear()
    before = psutil.Process().num_fds()
    for index in [*range(60), *range(59, -1, -3)]:
        assert torch.equal(reader.read(index).aux, wanted[index])
        assert psutil.Process().num_fds() <= before + 2 * 3
    assert len(parsed) == len(set(parsed)) > 3


def test_a_shard_that_went_missing_since_it_was_opened_is_named(tmp_path, records, monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_OPEN_SHARDS", 1)
    fill(tmp_path, records)
    reader = StoreReader(tmp_path)
    order = reader.in_stored_order()
    reader.read(order[0])
    reader.read(order[-1])
    for path in tmp_path.glob("shard-*.h5"):
        path.unlink()
    with pytest.raises(UserError, match=r"shard-.*No such file"):
        reader.read(order[0])
