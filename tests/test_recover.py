import sqlite3

import pytest
from fake_capture import fill, make_records, store_meta

from eagle3_utils.errors import UserError
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.shards.verify import verify_store
from eagle3_utils.states.store import StoreWriter


@pytest.fixture
def records():
    return make_records(60)


def test_killed_between_rename_and_commit_the_shard_is_taken_in(tmp_path, records):
    fill(tmp_path, records)
    last = max(tmp_path.glob("shard-*.h5"))
    number = int(last.stem[-6:])
    with sqlite3.connect(tmp_path / "ledger.sqlite") as ledger:
        ledger.execute("UPDATE samples SET state = 'pending', shard = NULL, row = NULL WHERE shard = ?", (number,))
        ledger.execute("DELETE FROM shards WHERE number = ?", (number,))
    (tmp_path / "shard-000099.h5.tmp").write_bytes(b"half a shard")
    assert not verify_store(tmp_path).ok
    with StoreWriter(tmp_path, store_meta()) as writer:
        assert writer.recovered > 0 and writer.register(records) == []
    assert not list(tmp_path.glob("*.tmp")) and verify_store(tmp_path, deep=True).ok


def test_lost_ledger_is_rebuilt_from_the_shards(tmp_path, records):
    fill(tmp_path, records)
    before = StoreReader(tmp_path).content_hash()
    (tmp_path / "ledger.sqlite").unlink()
    with pytest.raises(UserError, match="ledger is missing"):
        StoreReader(tmp_path)
    assert verify_store(tmp_path).problems == ["ledger.sqlite is missing"]
    verify_store(tmp_path, repair=True)
    assert StoreReader(tmp_path).content_hash() == before and verify_store(tmp_path, deep=True).ok
