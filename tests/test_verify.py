import os

import h5py
import pytest
from fake_capture import SMALL_SHARD, fill, make_records, sample_of, store_meta

from eagle3_utils.errors import UserError
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.shards.verify import stores_under, verify_store
from eagle3_utils.states.store import StoreWriter


@pytest.fixture
def records():
    return make_records(60)


def flip_a_byte(path, dataset="aux", row=0) -> None:
    with h5py.File(path) as file:
        position = file[dataset].id.get_offset() + int(file["offsets"][row]) * file[dataset][0].nbytes + 5
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x10]))


def test_a_flipped_byte_is_found_named_and_repaired(tmp_path, records):
    fill(tmp_path, records)
    before, path = StoreReader(tmp_path).content_hash(), tmp_path / "shard-000000.h5"
    flip_a_byte(path, row=4)
    with h5py.File(path) as file:
        victim = file["sample_id"][4].decode()
    assert verify_store(tmp_path).ok
    assert list(verify_store(tmp_path, deep=True).bad) == [victim]
    verify_store(tmp_path, deep=True, repair=True)
    assert victim not in StoreReader(tmp_path).ids
    with StoreWriter(tmp_path, store_meta(), SMALL_SHARD) as writer:
        missing = writer.register(records)
        assert [record.id for record in missing] == [victim]
        writer.add(sample_of(missing[0]))
    assert StoreReader(tmp_path).content_hash() == before and verify_store(tmp_path, deep=True).ok
    (tmp_path / "ledger.sqlite").unlink()  # the damaged row must not come back when the ledger is rebuilt
    verify_store(tmp_path, repair=True)
    assert StoreReader(tmp_path).content_hash() == before and verify_store(tmp_path, deep=True).ok


@pytest.mark.parametrize("damage", ["truncate", "delete", "garbage"])
def test_a_lost_shard_is_found_and_only_its_samples_come_again(tmp_path, records, damage):
    fill(tmp_path, records)
    before, path = StoreReader(tmp_path).content_hash(), tmp_path / "shard-000001.h5"
    with h5py.File(path) as file:
        lost = {value.decode() for value in file["sample_id"]}
    if damage == "truncate":
        os.truncate(path, path.stat().st_size - 100)
    elif damage == "delete":
        path.unlink()
    else:
        path.write_bytes(os.urandom(path.stat().st_size))
    report = verify_store(tmp_path, repair=True)
    assert set(report.bad) == lost and len(report.problems) == 1
    with StoreWriter(tmp_path, store_meta(), SMALL_SHARD) as writer:
        missing = writer.register(records)
        assert {record.id for record in missing} == lost
        for record in missing:
            writer.add(sample_of(record))
    assert StoreReader(tmp_path).content_hash() == before and verify_store(tmp_path, deep=True).ok


def test_all_stores_of_a_run_are_found_from_any_folder_above_them(tmp_path, records):
    stores = [tmp_path / "data" / "hidden_states" / name for name in ("train", "val")]
    for folder in stores:
        fill(folder, records[:5])
    for above in (tmp_path, tmp_path / "data", tmp_path / "data" / "hidden_states"):
        assert stores_under(above) == stores
    assert stores_under(stores[1]) == stores[1:]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="not a hidden-state store"):
        stores_under(tmp_path / "empty")
