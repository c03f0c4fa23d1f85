import pickle

import pytest
import torch
from fake_capture import fill, make_records

from eagle3_utils.errors import UserError
from eagle3_utils.states.reader import StoreReader


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
