import threading
import time
from pathlib import Path

import pytest
from fake_capture import make_records

from eagle3_utils.states.extraction import pool as pool_module
from eagle3_utils.states.extraction.pool import Pool, Task, Worker, backoff_seconds, in_buckets


def test_order_is_deterministic_long_first_within_buckets():
    records = make_records(1200)
    ordered = in_buckets(records)
    assert ordered == in_buckets(records)
    first = ordered[:512]
    assert {record.id for record in first} == {record.id for record in records[:512]}
    lengths = [len(record.input_ids) for record in first]
    assert lengths == sorted(lengths, reverse=True)


def test_in_flight_is_bounded_by_tokens():
    records = sorted(make_records(50), key=lambda record: -len(record.input_ids))
    worker = Worker("http://a", Path("."))
    pool = Pool(records, [worker], max_tokens=150, max_tries=3, patience_seconds=1)
    tasks = []
    while pool._has_room(worker, pool._ready[0]):
        tasks.append(pool.take(worker))
    assert worker.in_flight_tokens <= 150 and len(tasks) >= 2
    pool.arrived(worker, tasks[0])
    assert worker.in_flight_tokens == sum(task.num_tokens for task in tasks[1:])


def test_a_sample_that_kills_servers_is_given_up():
    worker = Worker("http://a", Path("."))
    pool = Pool(make_records(1), [worker], max_tokens=100, max_tries=2, patience_seconds=100)
    assert not pool.server_failed(worker, pool.take(worker), blame_sample=True)
    worker.retry_at = 0.0
    assert pool.server_failed(worker, pool.take(worker), blame_sample=True)
    assert pool.unfinished == 0 and pool.take(worker) is None


def test_a_sample_that_failed_at_one_server_is_left_to_another_while_there_is_one(monkeypatch):
    monkeypatch.setattr(pool_module, "FIRST_BACKOFF_SECONDS", 0.0)
    sick, other = Worker("http://a", Path(".")), Worker("http://b", Path("."))
    pool = Pool(make_records(3), [sick, other], max_tokens=1000, max_tries=9, patience_seconds=100)
    first = pool.take(sick)
    assert not pool.sample_failed(sick, first)
    second, third = pool.take(sick), pool.take(sick)
    assert [task.order for task in (first, second, third)] == [0, 1, 2], "it would have come first again"
    assert pool.take(other) is first
    assert not pool.sample_failed(other, first)
    assert pool.take(sick) is first, "no server is left that has not tried it"
    assert not pool.sample_failed(sick, second)
    other.dead = True
    assert pool.take(sick) is second


def test_backoff_doubles_up_to_half_a_minute():
    assert [backoff_seconds(tries) for tries in (1, 2, 3, 20)] == [0.5, 1.0, 2.0, 30.0]


def test_requests_that_fail_together_count_as_one_failure_of_the_server():
    worker = Worker("http://a", Path("."))
    pool = Pool(make_records(5), [worker], max_tokens=1000, max_tries=3, patience_seconds=100)
    tasks = [pool.take(worker) for _ in range(5)]
    for task in tasks:
        pool.server_failed(worker, task, blame_sample=False)
    assert worker.failures == 1 and not worker.dead and pool.unfinished == 5
    assert [task.tries for task in tasks] == [0] * 5


def test_a_server_that_fails_for_long_is_dead_and_the_other_goes_on():
    one, two = Worker("http://a", Path(".")), Worker("http://b", Path("."))
    pool = Pool(make_records(2), [one, two], max_tokens=1000, max_tries=3, patience_seconds=0)
    pool.server_failed(one, pool.take(one), blame_sample=False)
    assert one.dead and pool.take(one) is None
    for _ in range(2):
        task = pool.take(two)
        pool.arrived(two, task)
        pool.stored(two, task)
    assert pool.unfinished == 0 and pool.unfinished_tokens == 0 and pool.take(two) is None


@pytest.mark.parametrize("what", ["answers", "dumps"])
def test_a_server_that_fails_everything_beside_a_good_one_is_dead_before_it_uses_up_the_tries(caplog, what):
    sick, good = Worker("http://sick", Path(".")), Worker("http://good", Path("."))
    pool = Pool(make_records(25), [sick, good], max_tokens=10_000, max_tries=3, patience_seconds=100)
    tasks = [pool.take(sick) for _ in range(25)]
    for task in tasks:
        if what == "dumps":
            pool.arrived(sick, task)
        assert not (pool.rejected if what == "dumps" else pool.sample_failed)(sick, task)
    assert sick.dead and [task.tries for task in tasks] == [1] * 19 + [0] * 6
    assert f"20 {what} in a row of http://sick" in caplog.text and len(caplog.records) == 1
    for _ in range(30):  # the last server is not given up for its answers
        pool._blame(good, Task(0, tasks[0].record), what)
    assert not good.dead


def test_no_server_is_given_up_where_all_fail_alike():
    workers = [Worker(f"http://{name}", Path(".")) for name in "abc"]
    pool = Pool(make_records(90), workers, max_tokens=10_000, max_tries=3, patience_seconds=100)
    for _ in range(30):
        for worker in workers:
            pool.sample_failed(worker, pool.take(worker))
    assert not any(worker.dead for worker in workers)


def test_no_answer_in_time_is_the_servers_fault_unless_it_has_answered_others_since():
    worker = Worker("http://a", Path("."))
    pool = Pool(make_records(3), [worker], max_tokens=1000, max_tries=2, patience_seconds=100)
    slow, other, last = (pool.take(worker) for _ in range(3))
    asked_at = time.monotonic()
    pool.arrived(worker, other)
    pool.stored(worker, other)
    assert not pool.timed_out(worker, slow, asked_at) and slow.tries == 1 and not worker.dead
    assert not pool.timed_out(worker, last, time.monotonic()) and last.tries == 0 and worker.dead
    assert pool.unfinished == 2 and pool.take(worker) is None


def test_what_has_arrived_is_unfinished_until_it_is_stored_and_comes_back_when_it_is_no_good(monkeypatch):
    monkeypatch.setattr(pool_module, "FIRST_BACKOFF_SECONDS", 0.0)
    worker = Worker("http://a", Path("."))
    pool = Pool(make_records(2), [worker], max_tokens=1000, max_tries=2, patience_seconds=100)
    good, bad = pool.take(worker), pool.take(worker)
    pool.arrived(worker, good)
    assert not pool.all_arrived
    pool.arrived(worker, bad)
    assert pool.all_arrived and pool.unfinished == 2 and worker.in_flight_tokens == 0
    pool.stored(worker, good)
    assert not pool.rejected(worker, bad) and not pool.all_arrived
    assert pool.take(worker) is bad
    pool.arrived(worker, bad)
    assert pool.rejected(worker, bad) and pool.unfinished == 0 and not pool.all_arrived and pool.take(worker) is None


def test_threads_that_wait_are_told_of_retries_and_of_the_end_though_one_only_looks(monkeypatch):
    monkeypatch.setattr(pool_module, "FIRST_BACKOFF_SECONDS", 0.05)
    monkeypatch.setattr(pool_module, "POLL_SECONDS", 0.02)
    worker = Worker("http://a", Path("."))
    pool = Pool(make_records(3), [worker], max_tokens=1000, max_tries=2, patience_seconds=100)
    tasks, taken, all_taken = [pool.take(worker) for _ in range(3)], [], threading.Barrier(3, timeout=10)

    def serve():
        while (task := pool.take(worker)) is not None:
            taken.append(task)
            all_taken.wait()  # while the one that looked is busy, another looks
            pool.arrived(worker, task)
            pool.stored(worker, task)

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    for task in tasks:
        time.sleep(0.05)
        pool.sample_failed(worker, task)  # by a thread that does not come back for more
    for thread in threads:
        thread.join(20)
    assert sorted(tasks) == sorted(taken) and pool.unfinished == 0
