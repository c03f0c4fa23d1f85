import h5py
import pytest
import torch
import xxhash
from fake_capture import fill, make_records, states_of


@pytest.fixture
def records():
    return make_records(60)


def test_plain_h5py_reads_a_shard(tmp_path, records):
    fill(tmp_path, records)
    with h5py.File(tmp_path / "shard-000000.h5") as file:
        start, stop = file["offsets"][2:4]
        sample_id = file["sample_id"][2].decode()
        aux = torch.from_numpy(file["aux"][start:stop]).view(torch.bfloat16)
        assert file.attrs["codec"] == "bf16" and list(file.attrs["aux_layers"]) == [1, 2, 3]
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
