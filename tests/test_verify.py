import json
import os
import random
import shutil
import signal
import sqlite3
import traceback

import h5py
import pytest
from fake_capture import SMALL_SHARD, fill, flip_a_byte, make_records, sample_of, store_meta

from eagle3_utils import runs
from eagle3_utils.errors import UserError
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.shards import verify
from eagle3_utils.states.shards.ledger import Ledger
from eagle3_utils.states.shards.sample import encode_sample
from eagle3_utils.states.shards.shard import write_shard
from eagle3_utils.states.shards.verify import stores_under, verify_store
from eagle3_utils.states.store import StoreWriter

STATES = ("input_ids", "loss_mask", "final_rows", "aux", "final")


@pytest.fixture
def records():
    return make_records(60)


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


def put_in_place(folder, number, sample):
    """Write a shard of one sample; returns what enters it into the ledger."""
    path = folder / f"shard-{number:06d}.h5"
    size = write_shard(path, [encode_sample(sample, store_meta())], store_meta().attributes())
    with h5py.File(path) as file:
        row = {"id": sample.id, "source": sample.source, "num_tokens": len(sample.input_ids), "row": 0, "num_bytes": 1}
        row["checksum"] = int(file["checksum"][0])

    def enter(_seconds=0.0):
        with Ledger(folder / "ledger.sqlite") as ledger:
            ledger.commit_shard(number, size, [row])

    return enter


def test_a_shard_that_is_about_to_be_entered_is_no_problem(tmp_path, records, monkeypatch):
    fill(tmp_path, records[:3])
    enter = put_in_place(tmp_path, 1, sample_of(records[5]))
    monkeypatch.setattr(verify, "_ENTRY_SECONDS", 0.0)
    assert verify_store(tmp_path).problems == ["shard-000001.h5 is not in the ledger"]
    monkeypatch.setattr(verify.time, "sleep", enter)
    assert verify_store(tmp_path).ok


def test_a_value_that_is_not_finite_is_found_though_its_checksum_holds(tmp_path, records):
    fill(tmp_path, records[:3])
    broken = sample_of(records[5])
    broken.aux[1, 0, 0] = float("nan")
    enter = put_in_place(tmp_path, 1, broken)
    enter()
    assert verify_store(tmp_path).ok
    assert verify_store(tmp_path, deep=True).bad == {
        broken.id: "shard-000001.h5 row 0: aux has 1 values that are not finite"
    }


def test_a_ledger_that_says_something_else_than_the_shard_is_found_without_reading_states(tmp_path, records):
    fill(tmp_path, records[:12])
    wrong = {
        records[1].id: ("checksum = '0000000000000000'", "checksum differs from the ledger's"),
        records[3].id: ("num_tokens = num_tokens + 1", "length differs from the ledger's"),
        records[5].id: ("row = row + 1", "holds another sample"),
        records[7].id: ("source = 'x'", "source differs from the ledger's"),
    }
    with sqlite3.connect(tmp_path / "ledger.sqlite") as ledger:
        for sample_id, (change, _) in wrong.items():
            ledger.execute(f"UPDATE samples SET {change} WHERE id = ?", (sample_id,))
    report = verify_store(tmp_path)
    assert report.bad.keys() == wrong.keys() and not report.problems
    assert all(reason in report.bad[sample_id] for sample_id, (_, reason) in wrong.items())


def test_a_shard_of_another_corpus_among_its_own_is_named(tmp_path, records):
    for corpus in ("one", "two"):
        fill(tmp_path / corpus, records[:5], corpus=corpus)
    os.replace(tmp_path / "two" / "shard-000000.h5", tmp_path / "one" / "shard-000000.h5")
    report = verify_store(tmp_path / "one")
    assert report.problems == ["shard-000000.h5: corpus is 'two', store.json says 'one'"]
    assert set(report.bad) == {record.id for record in records[:5]}


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


def test_a_byte_flipped_in_a_shards_header_or_index_is_named_and_mended_wherever_it_is(tmp_path, records):
    """In a process of its own: HDF5 used to crash. Flipped padding is no damage: the store reads as before."""
    store, copy = tmp_path / "store", tmp_path / "copy"
    fill(store, records[:12])
    path, content, before = store / "shard-000000.h5", (store / "shard-000000.h5").read_bytes(), states_in(store)
    with h5py.File(path) as file:
        large = [range(file[name].id.get_offset(), file[name].id.get_offset() + file[name].nbytes) for name in STATES]
        finals = file["final_offsets"].id.get_offset()
    header = [place for place, byte in enumerate(content) if byte and not any(place in states for states in large)]
    rng = random.Random(0)
    places = [(finals + 8 * row + byte, bit) for row, byte, bit in ((0, 0, 0), (3, 0, 1), (5, 7, 7), (9, 6, 3))]
    places += [(place, rng.randrange(8)) for place in rng.sample(header, 30)]

    def outcome(place: int, bit: int) -> str:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        if verify_store(store, deep=True).ok:
            return "padding" if states_in(store) == before else "not found"
        shutil.copytree(store, copy, dirs_exist_ok=True)
        report = verify_store(copy, deep=True, repair=True)
        with Ledger(copy / "ledger.sqlite", read_only=True) as ledger:
            pending = ledger.counts()["pending"]
        mended = verify_store(copy, deep=True).ok and len(report.bad) == pending
        shutil.rmtree(copy)
        return "mended" if mended else "not mended"

    outcomes = in_a_fork(lambda: {f"byte {place} bit {bit}": outcome(place, bit) for place, bit in places})
    assert set(outcomes.values()) <= {"padding", "mended"}, outcomes
    assert all(outcome == "mended" for outcome in list(outcomes.values())[:4])
    assert list(outcomes.values()).count("mended") > 20


def states_in(folder) -> list:
    """Every stored byte of a store, with its ids and sources."""
    reader = StoreReader(folder)
    arrays = [{name: a.tobytes() for name, a in reader.stored(i).items()} for i in range(len(reader))]
    return [reader.ids, reader.sources, arrays]


def in_a_fork(work):
    """What `work()` returns, as JSON; fails when the process crashes or hangs."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            signal.alarm(60)
            with open(write, "w") as answer:
                answer.write(json.dumps(work()))
            os._exit(0)
        except Exception:  # noqa: BLE001 of a fork it would be lost
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write)
    with open(read) as answer:
        result = answer.read()
    assert os.waitpid(pid, 0)[1] == 0
    return json.loads(result)


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


def test_the_stores_of_a_run_are_found_where_its_data_lie(tmp_path, records):
    run, data = tmp_path / "run", tmp_path / "disk"
    fill(data / "hidden_states" / "train", records[:5])
    runs.write_json(run / "03_extract_hidden_states" / "DONE.json", {"data": str(data)})
    assert stores_under(run) == [data / "hidden_states" / "train"]
