from dataclasses import replace

import numpy as np
import pytest
import torch
from fake_capture import FakeServer, make_records, states_of, store_meta

from eagle3_utils.config import ExtractConfig
from eagle3_utils.errors import UserError
from eagle3_utils.states.extraction.dump import (
    BadDump,
    file_name_of,
    read_dump,
    share_staging,
    staged_sample,
    sweep,
    take_sample,
)
from eagle3_utils.states.sizes import dump_bytes_per_token

META = store_meta()
CONFIG = ExtractConfig(max_tokens_in_flight=300)


def test_staging_too_small_for_the_longest_sample_is_refused(tmp_path):
    tiny = CONFIG.model_copy(update={"staging_max_bytes": 1 << 20})
    long = make_records(1)
    long[0].input_ids = list(range(9000))
    with pytest.raises(UserError, match="staging_max_bytes"):
        share_staging([tmp_path], long, META, tiny)
    held, tokens = share_staging([tmp_path], make_records(3), META, tiny)
    assert held == (1 << 20) // 6 and tokens == 300


def test_a_servers_own_limit_and_the_shares_of_its_writers_count(tmp_path):
    records, wide = make_records(3), CONFIG.model_copy(update={"max_tokens_in_flight": 1 << 30})
    per_token = dump_bytes_per_token(META.hidden_size, len(META.aux_layers))
    own = {"max_bytes": 1 << 20, "ranks": {"writers": 2}}
    held, tokens = share_staging([tmp_path], records, META, wide, handshakes=[own, own | {"max_bytes": 4 << 20}])
    assert held == (2 << 20) // 6 and tokens == (2 << 20) // 5 // per_token
    longest = max(len(record.input_ids) for record in records)
    for room, fits in ((5 * longest * per_token, True), (5 * longest * per_token - 1, False)):
        tight = [own | {"max_bytes": room}]  # of each of two writers, either of which may get the longest sample
        if fits:
            share_staging([tmp_path], records, META, wide, handshakes=tight)
            continue
        with pytest.raises(UserError, match=f"SGLANG_HS_MAX_BYTES.* to {2 * 5 * longest * per_token} or more"):
            share_staging([tmp_path], records, META, wide, handshakes=tight)


def test_ids_that_differ_only_in_odd_characters_get_different_files():
    assert file_name_of("chat-1") == "chat-1"
    assert file_name_of("a/b") != file_name_of("a:b")
    assert "/" not in file_name_of("../../etc/passwd") and len(file_name_of("x" * 500)) < 130


@pytest.fixture
def dumped(tmp_path):
    """A record, the request id of its dump, and the dump's path."""
    record = make_records(1, seed=3)[0]
    FakeServer(tmp_path).dump("hs-1", record.input_ids, None)
    return record, tmp_path / "hs-1.safetensors"


def test_a_dump_is_mapped_and_becomes_the_records_sample(dumped):
    record, path = dumped
    dump = read_dump(path)
    path.unlink()  # the mapping keeps the bytes
    sample = take_sample(dump, record, "hs-1", META, "n1")
    aux, final = states_of(record.input_ids)
    assert torch.equal(sample.aux, aux) and torch.equal(sample.final, final)
    assert sample.input_ids.tolist() == record.input_ids and sample.loss_mask.tolist() == record.loss_mask
    assert sample.input_ids.dtype == np.int32 and (sample.id, sample.source) == (record.id, record.source)


@pytest.mark.parametrize("final", ["all", "supervised"])
def test_what_a_staged_sample_says_unread_is_what_it_is_when_read(dumped, final):
    record, path = dumped
    meta = store_meta(final=final)
    staged = staged_sample(path, path.stat().st_size, record, "hs-1", meta, "n1", print)
    sample = staged.load(meta)
    assert (staged.id, staged.stored_bytes) == (sample.id, sample.stored_bytes(meta))
    assert torch.equal(sample.aux, states_of(record.input_ids)[0])
    with pytest.raises(BadDump, match="not 'hs-2'"):
        staged_sample(path, 0, record, "hs-2", meta, "n1", print).load(meta)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        staged.load(meta)


def test_a_dump_of_another_request_server_or_length_is_refused(dumped):
    record, path = dumped
    dump = read_dump(path)
    with pytest.raises(BadDump, match="not 'hs-2'"):
        take_sample(dump, record, "hs-2", META, "n1")
    with pytest.raises(BadDump, match="another server"):
        take_sample(dump, record, "hs-1", META, "n2")
    for name, reason in (("nonce", "nonce None"), ("layers", "layers None")):
        silent = replace(dump, metadata={key: value for key, value in dump.metadata.items() if key != name})
        with pytest.raises(BadDump, match=reason):
            take_sample(silent, record, "hs-1", META, "n1")
    record.input_ids = [*record.input_ids, 5]
    with pytest.raises(BadDump, match="were sent"):
        take_sample(dump, record, "hs-1", META, "n1")


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x05\0\0\0\0\0\0\0nojsn", b"\x02\0\0\0\0\0\0\0{}"])
def test_a_file_that_is_no_dump_is_refused(tmp_path, content):
    path = tmp_path / "hs-1.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadDump):
        read_dump(path)


def test_sweep_keeps_the_runs_own_dumps_and_the_handshake(tmp_path):
    for name in ("hs-aaaa-1.safetensors", "hs-bbbb-1.safetensors", "hs-bbbb-2.error", "handshake.json"):
        (tmp_path / name).touch()
    sweep([tmp_path], keep="aaaa")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["handshake.json", "hs-aaaa-1.safetensors"]
    sweep([tmp_path])
    assert [path.name for path in tmp_path.iterdir()] == ["handshake.json"]
