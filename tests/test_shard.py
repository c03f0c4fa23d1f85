import os
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import torch
import xxhash
from fake_capture import Record, fill, make_records, sample_of, states_of, store_meta

from eagle3_utils.states.shards import shard as shard_module
from eagle3_utils.states.shards.sample import encode_sample
from eagle3_utils.states.shards.shard import DamagedShard, Shard, write_shard
from eagle3_utils.states.store import StoreWriter


@pytest.fixture
def records():
    return make_records(60)


def test_plain_h5py_reads_a_shard(tmp_path, records):
    fill(tmp_path, records)
    with h5py.File(tmp_path / "shard-000000.h5") as file:
        start, stop = file["offsets"][2:4]
        sample_id = file["sample_id"][2].decode()
        aux = torch.from_numpy(file["aux"][start:stop]).view(torch.bfloat16)
        assert file.attrs["codec"] == b"bf16" and list(file.attrs["aux_layers"]) == [1, 2, 3]
        assert file.attrs["final_is_post_norm"] and file["aux"].chunks is None
        assert file["input_ids"].dtype == "<i4" and file["aux"].dtype == "<u2"
    record = next(record for record in records if record.id == sample_id)
    assert torch.equal(aux, states_of(record.input_ids)[0])


def test_checksum_is_xxh3_of_id_and_stored_bytes(tmp_path, records):
    fill(tmp_path, records)
    with h5py.File(tmp_path / "shard-000000.h5") as file:
        a, b = file["offsets"][3:5]
        c, d = file["final_offsets"][3:5]
        parts = [file[name][a:b].tobytes() for name in ("input_ids", "loss_mask", "final_rows", "aux")]
        content = file["sample_id"][3] + b"".join(parts) + file["final"][c:d].tobytes()
        assert int(file["checksum"][3]) == xxhash.xxh3_64_intdigest(content)


def test_a_shard_gets_its_name_only_after_its_bytes_are_on_disk_and_the_name_is_synced_too(
    tmp_path, records, monkeypatch
):
    steps, fsync, rename = [], os.fsync, os.rename

    def noted_fsync(file):
        steps.append(os.path.basename(os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    def noted_rename(old, new):
        steps.append((old.name, new.name))
        rename(old, new)

    samples = [encode_sample(sample_of(record), store_meta()) for record in records]
    monkeypatch.setattr(shard_module.os, "fsync", noted_fsync)
    monkeypatch.setattr(shard_module.os, "rename", noted_rename)
    write_shard(tmp_path / "shard-000000.h5", samples, store_meta().attributes())
    assert steps == ["shard-000000.h5.tmp", ("shard-000000.h5.tmp", "shard-000000.h5"), tmp_path.name]


def test_rows_are_read_into_given_memory_also_when_the_kernel_returns_less_than_asked(tmp_path, records, monkeypatch):
    fill(tmp_path, records)
    shard, preadv = Shard(tmp_path / "shard-000000.h5"), os.preadv
    monkeypatch.setattr(shard_module.os, "preadv", lambda file, parts, at: preadv(file, [parts[0][:101]], at))
    for row in range(len(shard)):
        for name in ("aux", "final"):
            stored = shard.arrays(row)[name]
            whole, rest = np.zeros_like(stored), np.zeros_like(stored[1:])
            shard.read_into(row, name, whole)
            assert (whole == stored).all()
            if len(rest):
                shard.read_into(row, name, rest, first=1)
                assert (rest == stored[1:]).all()


def test_a_shard_cut_while_it_is_open_is_an_error_not_zeros(tmp_path, records):
    fill(tmp_path, records)
    shard = Shard(tmp_path / "shard-000000.h5")
    out = np.zeros_like(shard.arrays(len(shard) - 1)["aux"])
    os.truncate(shard.path, 8192)
    with pytest.raises(DamagedShard, match="aux reaches beyond the end"):
        shard.read_into(len(shard) - 1, "aux", out)


def test_a_reader_in_order_has_the_disk_read_ahead_and_a_random_one_only_what_it_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_module, "READ_AHEAD_ROW_BYTES", 32)
    lengths = [6000] * 12  # 576 kB of aux a sample
    records = [Record(f"r{number:02d}", "a", [number] * length, [0] + [1] * (length - 1))
               for number, length in enumerate(lengths)]  # fmt: skip
    with StoreWriter(tmp_path, store_meta()) as writer:
        for record in records:
            writer.add(sample_of(record))
    shard = Shard(tmp_path / "shard-000000.h5")
    asked, column = [], shard._columns["aux"]
    shard._map = SimpleNamespace(madvise=lambda _kind, start, size: asked.append((start, size)))
    shard._view = lambda *_: None
    for row in (7, 3, 9):
        shard.arrays(row)
        start, size = asked[-2]  # aux, then final
        assert start <= column.position + int(shard.offsets[row]) * column.row_bytes
        assert 6000 * column.row_bytes <= size < 6000 * column.row_bytes + 4096
    asked.clear()
    for row in range(10, 12):
        shard.arrays(row)
    assert max(start + size for start, size in asked[:1]) == column.position + 72_000 * column.row_bytes
    asked.clear()
    shard.arrays(0)
    shard.arrays(1)
    shard.arrays(2)
    assert len(asked) == 4  # 0: aux and final; 1: the rest of the shard; 2: nothing more to ask for
