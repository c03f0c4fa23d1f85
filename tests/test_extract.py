import multiprocessing
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_capture import HIDDEN, FakeServer, make_records, states_of
from small_disk import small_disk

from eagle3_utils.config import ExtractConfig
from eagle3_utils.errors import UserError
from eagle3_utils.states import extract as extract_module
from eagle3_utils.states.extract import extract
from eagle3_utils.states.extraction import dump as dump_module
from eagle3_utils.states.extraction import pool as pool_module
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.shards.ledger import Ledger
from eagle3_utils.states.shards.verify import verify_store
from eagle3_utils.states.store import StoreMeta, StoreWriter

META = StoreMeta(hidden_size=HIDDEN, aux_layers=[1, 2, 3], fingerprint="f", final="supervised")
CONFIG = ExtractConfig(shard_bytes=1 << 20, max_tokens_in_flight=300, min_free_bytes=0, max_retries=2, shard_builders=0)


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(pool_module, "FIRST_BACKOFF_SECONDS", 0.02)
    monkeypatch.setattr(extract_module, "SERVER_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(extract_module, "PROGRESS_SECONDS", 0.1)
    monkeypatch.setattr(dump_module, "DUMP_PATIENCE_SECONDS", 1.0)


def check_store(folder, records) -> None:
    """Every record once, every stored bit as the fake server made it."""
    reader = StoreReader(folder)
    assert reader.ids == sorted(record.id for record in records)
    for record in records:
        sample = reader.read(reader.index_of(record.id))
        aux, final = states_of(record.input_ids)
        assert sample.input_ids.tolist() == record.input_ids and sample.source == record.source
        assert torch.equal(sample.aux, aux)
        assert torch.equal(sample.final, final[torch.tensor([*record.loss_mask[1:], 0]).bool()])
    assert verify_store(folder, deep=True).ok


def staged(server) -> list[Path]:
    return list(server.dump_dir.glob("hs-*"))


@pytest.mark.parametrize("shard_builders", [0, 1])
def test_every_record_is_stored_and_nothing_stays_staged(tmp_path, shard_builders):
    records, shown = make_records(100), []
    config = CONFIG.model_copy(update={"shard_builders": shard_builders})
    with FakeServer(tmp_path / "dumps") as server:
        report = extract([server], records, tmp_path / "store", META, config, shown.append)
        assert staged(server) == []
    check_store(tmp_path / "store", records)
    assert (report.num_samples, report.num_tokens) == (100, sum(len(record.input_ids) for record in records))
    assert report.state_bytes == StoreReader(tmp_path / "store").num_bytes and not report.failures
    assert shown[-1]["done"] == shown[-1]["total"] == 100 and shown[-1]["eta_seconds"] == 0.0
    assert all(rid.startswith("hs-") for rid in server.rids) and len(set(server.rids)) == 100


def test_dumps_that_went_away_before_they_were_stored_are_asked_for_again(tmp_path, monkeypatch):
    records, flush, gone = make_records(20), StoreWriter.flush, []
    with FakeServer(tmp_path / "dumps") as server:

        def flush_without_one(writer):
            if not gone:
                gone.extend(staged(server)[:1])
                gone[0].unlink()
            flush(writer)

        monkeypatch.setattr(StoreWriter, "flush", flush_without_one)
        report = extract([server], records, tmp_path / "store", META, CONFIG)
        assert staged(server) == []
    assert (report.num_samples, report.num_retries, len(server.rids)) == (20, 1, 21)
    check_store(tmp_path / "store", records)


@pytest.mark.parametrize(
    "fault", ["nan", "other ids", "other layers", "other server", "truncated", "http 500", "no dump"]
)
def test_a_bad_answer_is_retried(tmp_path, fault):
    records = make_records(12)
    bad = records[5].id
    with FakeServer(tmp_path / "dumps", lambda rid: fault if f"{bad}-1" in rid else None) as server:
        report = extract([server], records, tmp_path / "store", META, CONFIG)
        assert staged(server) == []
    assert (report.num_retries, report.num_samples) == (1, 12)
    assert report.num_tokens == sum(len(record.input_ids) for record in records)
    check_store(tmp_path / "store", records)


def test_a_bad_dump_in_a_shard_built_elsewhere_is_retried(tmp_path):
    records, config = make_records(12), CONFIG.model_copy(update={"shard_builders": 1})
    bad = records[5].id
    with FakeServer(tmp_path / "dumps", lambda rid: "nan" if f"{bad}-1" in rid else None) as server:
        report = extract([server], records, tmp_path / "store", META, config)
        assert staged(server) == []
    assert (report.num_retries, report.num_samples) == (1, 12) and report.builders_cpu_seconds > 0
    check_store(tmp_path / "store", records)


def test_a_sample_that_keeps_failing_is_recorded_and_the_run_goes_on(tmp_path):
    records = make_records(20)
    bad = records[3].id
    with FakeServer(tmp_path / "dumps", lambda rid: "nan" if bad in rid else None) as server:
        with pytest.raises(UserError, match=f"1 samples failed, max_failed is 0; the first: {bad}: aux has 1 values"):
            extract([server], records, tmp_path / "store", META, CONFIG)
        check_store(tmp_path / "store", [record for record in records if record.id != bad])
        with Ledger(tmp_path / "store" / "ledger.sqlite", read_only=True) as ledger:
            assert ledger.failures() == {bad: "aux has 1 values that are not finite"}
        assert sum(bad in rid for rid in server.rids) == CONFIG.max_retries + 1
        allowed = CONFIG.model_copy(update={"max_failed": 1})
        report = extract([server], records, tmp_path / "store", META, allowed)
        assert list(report.failures) == [bad] and report.num_resumed == 19
    with FakeServer(tmp_path / "dumps") as healthy:
        extract([healthy], records, tmp_path / "store", META, CONFIG)
    check_store(tmp_path / "store", records)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("http 500", "answers in a row were no good; the last: HTTP 500: out"), ("nan", "dumps in a row .* not finite")],
)
def test_a_server_that_fails_everything_stops_the_run_before_every_sample_is_given_up(
    tmp_path, monkeypatch, fault, reason
):
    monkeypatch.setattr(extract_module, "MAX_FAILURES_IN_A_ROW", 30)
    records, store = make_records(100), tmp_path / "store"
    with (
        FakeServer(tmp_path / "dumps", lambda rid: fault) as server,
        pytest.raises(UserError, match=reason) as stop,
    ):
        extract([server], records, store, META, CONFIG)
    assert "resumes" in str(stop.value)
    with Ledger(store / "ledger.sqlite", read_only=True) as ledger:
        assert len(ledger.failures()) < 50
    with FakeServer(tmp_path / "again") as healthy:
        extract([healthy], records, store, META, CONFIG)
    check_store(store, records)


def test_a_server_that_fails_everything_at_once_leaves_its_work_to_a_slower_one(tmp_path):
    records, shown = make_records(120), []
    with (
        FakeServer(tmp_path / "a", lambda rid: "http 500") as sick,
        FakeServer(tmp_path / "b", delay_seconds=0.02) as other,
    ):
        report = extract([sick, other], records, tmp_path / "store", META, CONFIG, shown.append)
    check_store(tmp_path / "store", records)
    assert not report.failures and len(sick.rids) >= 20 and shown[-1]["servers_alive"] == 1


def test_the_work_of_a_server_that_hangs_goes_to_the_other(tmp_path):
    records = make_records(40)
    config = CONFIG.model_copy(update={"request_timeout_seconds": 0.2, "max_tokens_in_flight": 60})
    with (
        FakeServer(tmp_path / "a", lambda rid: "hang") as hanging,
        FakeServer(tmp_path / "b", delay_seconds=0.02) as other,
    ):
        report = extract([hanging, other], records, tmp_path / "store", META, config)
    check_store(tmp_path / "store", records)
    assert report.num_retries > 0 and hanging.rids


def test_the_work_of_a_dead_server_goes_to_the_other(tmp_path):
    records = make_records(80)
    with (
        FakeServer(tmp_path / "a", delay_seconds=0.02) as mortal,
        FakeServer(tmp_path / "b", delay_seconds=0.02) as other,
    ):

        def kill(figures):
            if figures["done"] > 5:
                mortal.stop()

        extract([mortal, other], records, tmp_path / "store", META, CONFIG, kill)
        assert len(mortal.rids) > 0 and staged(mortal) == staged(other) == []
    check_store(tmp_path / "store", records)


def test_when_no_server_answers_the_run_stops_and_resumes_with_another_number_of_them(tmp_path):
    records = make_records(60)
    with FakeServer(tmp_path / "a", lambda rid: "die" if records[40].id in rid else None) as server:
        extract([server], records[:30], tmp_path / "store", META, CONFIG)
        server.stop()
        with pytest.raises(UserError, match="no server answers any more; 30 samples to go"):
            extract([server], records, tmp_path / "store", META, CONFIG)
    shards = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").glob("shard-*.h5")}
    assert len(StoreReader(tmp_path / "store")) == 30
    with FakeServer(tmp_path / "b") as one, FakeServer(tmp_path / "c") as two:
        report = extract([one, two], records, tmp_path / "store", META, CONFIG)
    assert (report.num_resumed, report.num_samples) == (30, 30)
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in shards.items())
    check_store(tmp_path / "store", records)


def test_leftovers_of_a_dead_run_are_removed_not_mixed_up(tmp_path):
    records = make_records(10)
    with FakeServer(tmp_path / "dumps") as server:
        server.dump(f"hs-0badcafe-{records[2].id}-1", records[2].input_ids, "nan")
        (server.dump_dir / "handshake.json").write_text("{}")
        extract([server], records, tmp_path / "store", META, CONFIG)
        assert staged(server) == [] and (server.dump_dir / "handshake.json").exists()
    check_store(tmp_path / "store", records)


def test_one_extraction_per_dump_folder(tmp_path):
    with FakeServer(tmp_path / "dumps", delay_seconds=0.05) as server:

        def intrude(figures):
            with pytest.raises(UserError, match="another extraction uses this dump folder"):
                extract([server], make_records(2), tmp_path / "other", META, CONFIG)

        extract([server], make_records(10), tmp_path / "store", META, CONFIG, intrude)


def test_stops_before_the_disk_is_full(tmp_path):
    config = CONFIG.model_copy(update={"min_free_bytes": 1 << 60})
    with FakeServer(tmp_path / "dumps", delay_seconds=0.01) as server:
        with pytest.raises(UserError, match="stopped before the disk is full") as stop:
            extract([server], make_records(50), tmp_path / "store", META, config)
        assert "resumes" in str(stop.value) and staged(server) == []


def test_on_a_disk_that_is_full_whole_shards_stay_and_with_more_room_it_goes_on(tmp_path):
    records, store = make_records(120), tmp_path / "disk" / "store"
    config = CONFIG.model_copy(update={"staging_max_bytes": 1 << 20})
    with small_disk(tmp_path / "disk", 330) as resize, FakeServer(tmp_path / "dumps") as server:
        with pytest.raises(UserError, match="disk full") as stop:
            extract([server], records, store, META, config)
        assert "resumes" in str(stop.value) and staged(server) == []
        stored = len(StoreReader(store))
        assert 0 < stored < 120 and not list(store.glob("*.tmp"))
        report = verify_store(store, deep=True)  # where the ledger found no room, its shard is taken in by the next run
        assert not report.bad and all("not in the ledger" in problem for problem in report.problems)
        resize(8 << 10)
        assert extract([server], records, store, META, config).num_resumed == stored
        check_store(store, records)


def test_an_interrupt_keeps_what_has_arrived(tmp_path):
    records = make_records(150)

    def interrupt(figures):
        if figures["done"] >= 5:
            raise KeyboardInterrupt

    with FakeServer(tmp_path / "dumps", delay_seconds=0.1) as server:
        with pytest.raises(KeyboardInterrupt):
            extract([server], records, tmp_path / "store", META, CONFIG, interrupt)
        stored = len(StoreReader(tmp_path / "store"))
        assert 5 <= stored < 150
        assert extract([server], records, tmp_path / "store", META, CONFIG).num_resumed == stored
    check_store(tmp_path / "store", records)


def client(url: str, dump_dir: Path, store: Path) -> None:
    """What the killed process runs; small staging, so that shards are closed all the time."""
    server = SimpleNamespace(url=url, dump_dir=dump_dir, handshake={"nonce": "n1"})
    builders = int(os.environ.get("KILL_BUILDERS", "0"))
    small = CONFIG.model_copy(update={"staging_max_bytes": 1 << 20, "shard_builders": builders})
    extract([server], make_records(400), store, META, small)


def test_killed_again_and_again_nothing_is_lost_or_doubled(tmp_path, monkeypatch):
    """kill -9 of the client at random moments; the last start finishes, and the states are those of a clean run."""
    random = np.random.default_rng(int(os.environ.get("KILL_SEED", "0")))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    context = multiprocessing.get_context("forkserver")  # imports once, then forks: a start costs milliseconds
    context.set_forkserver_preload(["test_extract"])
    with FakeServer(tmp_path / "dumps", delay_seconds=0.02) as server:
        arguments = (server.url, server.dump_dir, tmp_path / "store")
        kills = 0
        for _ in range(int(os.environ.get("KILLS", "4"))):
            seen = len(server.rids)
            process = context.Process(target=client, args=arguments)
            process.start()
            while len(server.rids) == seen and process.is_alive():
                time.sleep(0.005)
            time.sleep(random.uniform(0.0, float(os.environ.get("KILL_SECONDS", "0.5"))))
            process.kill()
            process.join()
            kills += process.exitcode == -signal.SIGKILL
            print(f"exit {process.exitcode}, {len(list((tmp_path / 'store').glob('shard-*.h5')))} shards")
        assert kills >= 1
        process = context.Process(target=client, args=arguments)
        process.start()
        process.join()
        assert process.exitcode == 0
        assert staged(server) == []
    check_store(tmp_path / "store", make_records(400))
