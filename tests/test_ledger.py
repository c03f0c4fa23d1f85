import shutil
import sqlite3

import pytest
from small_disk import small_disk

from eagle3_utils.errors import UserError
from eagle3_utils.states.shards.ledger import Ledger


def row(sample_id, number):
    return {"id": sample_id, "source": "chat", "num_tokens": 7, "row": number, "checksum": 2**64 - 1, "num_bytes": 99}


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.register([(name, "chat", 7) for name in "abcd"])
        yield ledger


def test_a_sample_goes_from_pending_to_done_with_its_place(ledger):
    ledger.commit_shard(3, 1000, [row("b", 0), row("a", 1)])
    assert ledger.counts() == {"pending": 2, "done": 2, "failed": 0}
    assert ledger.places() == [("a", "chat", 7, 3, 1, "f" * 16, 99), ("b", "chat", 7, 3, 0, "f" * 16, 99)]
    assert ledger.shards() == {3: (2, 1000)} and ledger.ids("pending") == {"c", "d"}


def test_registering_again_keeps_states(ledger):
    ledger.commit_shard(0, 1000, [row("a", 0)])
    ledger.fail("b", "NaN", 3)
    ledger.register([(name, "chat", 7) for name in "abcde"])
    assert ledger.counts() == {"pending": 3, "done": 1, "failed": 1}


def test_failures_carry_their_reason_and_can_be_tried_again(ledger):
    ledger.fail("c", "aux has 1 values that are not finite", 4)
    assert ledger.failures() == {"c": "aux has 1 values that are not finite"}
    ledger.retry_failed()
    assert ledger.failures() == {} and "c" in ledger.ids("pending")


def test_a_done_sample_cannot_fail(ledger):
    ledger.commit_shard(0, 1000, [row("a", 0)])
    ledger.fail("a", "late", 1)
    assert ledger.ids("done") == {"a"}


def test_put_back_makes_done_samples_pending(ledger):
    ledger.commit_shard(0, 1000, [row("a", 0), row("b", 1)])
    ledger.put_back({"a": "flipped byte"})
    assert ledger.ids("done") == {"b"} and "a" in ledger.ids("pending")


def test_a_shard_is_committed_whole_or_not_at_all(ledger):
    with pytest.raises(sqlite3.Error):
        ledger.commit_shard(0, 1000, [row("a", 0), row("b", 1) | {"num_tokens": None}])
    assert ledger.counts()["done"] == 0 and ledger.shards() == {}


def test_it_can_be_read_beside_a_writer_and_is_one_file_afterwards(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as writer:
        writer.register([("a", "chat", 7)])
        with Ledger(path, read_only=True) as reader:
            assert reader.counts()["pending"] == 1
            writer.commit_shard(0, 1000, [row("a", 0)])
            assert reader.counts()["done"] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["ledger.sqlite"]


def test_runs_add_up(ledger):
    ledger.note_run("x", 100, 2.0)
    ledger.note_run("x", 300, 5.0)  # the same run, further on
    ledger.note_run("y", 50, 1.0)
    assert ledger.run_totals() == (2, 350, 6.0)


def test_a_full_disk_is_named_and_nothing_committed_is_lost(tmp_path):
    rows = [row(f"s{number:05d}", number) for number in range(2000)]
    with small_disk(tmp_path / "disk", 400):
        with Ledger(tmp_path / "disk" / "ledger.sqlite") as ledger:
            ledger.commit_shard(0, 10, rows[:10])
            (tmp_path / "disk" / "ballast").write_bytes(bytes(shutil.disk_usage(tmp_path / "disk").free))
            with pytest.raises(UserError, match="disk full"):
                ledger.commit_shard(1, 10, rows[10:])
        with Ledger(tmp_path / "disk" / "ledger.sqlite", read_only=True) as ledger:
            assert ledger.counts()["done"] == 10
        (tmp_path / "disk" / "ballast").unlink()
        with Ledger(tmp_path / "disk" / "ledger.sqlite") as ledger:
            ledger.commit_shard(1, 10, rows[10:20])
            assert ledger.counts()["done"] == 20


@pytest.mark.parametrize("read_only", [True, False])
def test_a_damaged_file_is_named_with_the_way_to_rebuild_it(tmp_path, read_only):
    (tmp_path / "ledger.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(UserError, match=r"ledger\.sqlite is damaged") as damaged:
        Ledger(tmp_path / "ledger.sqlite", read_only).counts()
    assert f"eagle3 verify {tmp_path} --repair" in str(damaged.value)
