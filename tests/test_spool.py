"""Records wait on disk, and what is chosen of them depends on seed, source and id alone."""

from __future__ import annotations

from collections import Counter
from time import perf_counter

import numpy as np
import pytest

from eagle3_utils.corpus.records import Record
from eagle3_utils.corpus.spool import RecordSpool

RECORDS = [Record(f"r{i}", "xy"[i % 2], [i, i + 1, 163839], [0, 1, 1]) for i in range(200)]


def filled(path, records=RECORDS, seed: int = 0) -> RecordSpool:
    spool = RecordSpool(path, seed)
    for record in records:
        spool.append(record, "xy".index(record.source))
    return spool


def names(spool, numbers) -> list[str]:
    return [record.id for record in spool.records(numbers)]


def test_records_come_back_in_any_order_and_the_file_goes_away(tmp_path):
    with filled(tmp_path / "spool") as spool:
        assert len(spool) == 200
        assert [spool.read(i) for i in (199, 0, 7)] == [RECORDS[199], RECORDS[0], RECORDS[7]]
    assert list(tmp_path.iterdir()) == []


def test_choice_and_order_do_not_depend_on_the_order_of_arrival(tmp_path):
    quotas = [(0.5, None), (1.0, 10)]
    with filled(tmp_path / "a") as one, filled(tmp_path / "b", RECORDS[::-1]) as two:
        first, second = names(one, one.choose(quotas)), names(two, two.choose(quotas))
        assert first == second
        assert [name.id for name in one.records(one.choose([(1.0, None), (1.0, None)]))] != [r.id for r in RECORDS]
        kept = [RECORDS[int(name[1:])].source for name in first]
        assert (kept.count("x"), kept.count("y")) == (50, 10)
    with filled(tmp_path / "c", seed=1) as other:
        assert names(other, other.choose(quotas)) != first


def test_more_records_keep_the_order_of_those_there_were(tmp_path):
    everything = [(1.0, None), (1.0, None)]
    with filled(tmp_path / "a", RECORDS[:100]) as fewer, filled(tmp_path / "b") as more:
        before = names(fewer, fewer.choose(everything))
        after = names(more, more.choose(everything))
        assert [name for name in after if name in set(before)] == before


@pytest.mark.parametrize("fraction, num_val", [(0.1, 20), (0.001, 2), (0.999, 198)])
def test_the_same_share_of_every_source_validates(tmp_path, fraction, num_val):
    with filled(tmp_path / "a") as spool:
        chosen = spool.choose([(1.0, None), (1.0, None)])
        train, val = spool.split(chosen, fraction)
        sources = [record.source for record in spool.records(val)]
        assert len(val) == num_val and sources.count("x") == sources.count("y")
        assert sorted([*train, *val]) == list(range(200))
        assert names(spool, np.sort(val)) != names(spool, val) or num_val == 2


def test_weights_above_one_repeat_records_of_training_only(tmp_path):
    with filled(tmp_path / "a") as spool:
        train, val = spool.split(spool.choose([(2.3, None), (0.5, None)]), 0.2)
        repeated = spool.repeat(train, [2.3, 0.5])
        records = list(spool.records(repeated))
        count = Counter(record.id.split("~")[0] for record in records if record.source == "x")
        assert Counter(count.values()) == {2: 56, 3: 24}  # 80 records, 1.3 × 80 = 104 further copies
        assert sum(record.source == "y" for record in records) == 40
        assert len({record.id for record in records}) == len(records) == 184 + 40
        assert not {record.id.split("~")[0] for record in records} & set(names(spool, val))
        assert all("~" not in record.id for record in spool.records(spool.repeat(train, [1.0, 0.5])))
        firsts = {number: place for place, number in reversed(list(enumerate(repeated.tolist())))}
        assert [records[place].id for number, place in firsts.items()] == names(spool, np.asarray(list(firsts)))


def labelled(path, labels) -> RecordSpool:
    spool = RecordSpool(path, 0)
    for number, label in enumerate(labels):
        spool.append(Record(f"r{number}", label, [number], [1]), 0)
    return spool


def test_sources_of_a_single_record_are_split_together(tmp_path):
    with labelled(tmp_path / "a", [f"only {i}" for i in range(50)] + ["x"] * 20 + ["y"] * 2) as spool:
        train, val = spool.split(spool.choose([(1.0, None)]), 0.1)
        count = Counter(record.source.split()[0] for record in spool.records(val))
        assert count == {"only": 5, "x": 2, "y": 1}
        assert sorted([*train, *val]) == list(range(72))
    with labelled(tmp_path / "b", ["x"] * 20 + ["only"]) as spool:
        train, val = spool.split(spool.choose([(1.0, None)]), 0.1)
        assert [record.source for record in spool.records(val)] == ["x", "x"]


def test_a_source_with_records_enough_is_split_as_ever_whatever_stands_beside_it(tmp_path):
    as_ever = ["r36", "r8", "r10", "r15"]  # so that a corpus can be made again
    with labelled(tmp_path / "a", ["x"] * 40) as alone, labelled(tmp_path / "b", ["x"] * 40 + [*"abcdef"]) as among:
        first = names(alone, alone.split(alone.choose([(1.0, None)]), 0.1)[1])
        second = [r for r in among.records(among.split(among.choose([(1.0, None)]), 0.1)[1]) if r.source == "x"]
        assert first == [record.id for record in second] == as_ever


def test_a_split_of_many_sources_takes_time_in_proportion(tmp_path):
    with labelled(tmp_path / "a", (f"label {i // 2}" for i in range(40_000))) as spool:
        chosen, start = spool.choose([(1.0, None)]), perf_counter()
        assert len(spool.split(chosen, 0.1)[1]) == 20_000
        assert perf_counter() - start < 2  # label by label it took 6 s


def test_the_ids_of_copies_are_not_those_of_other_records(tmp_path):
    with RecordSpool(tmp_path / "a", 0) as spool:
        for name in ("a", "a~2", "a~2~", "b"):
            spool.append(Record(name, "x", [1], [1]), 0)
        ids = [record.id for record in spool.records(spool.repeat(np.arange(4), [3.0]))]
    assert Counter(ids).most_common(1)[0][1] == 1
    copies = {"a~2~~", "a~3", "a~2~2", "a~2~3", "a~2~~2", "a~2~~3", "b~2", "b~3"}
    assert set(ids) == {"a", "a~2", "a~2~", "b"} | copies


def test_a_source_of_one_record_trains(tmp_path):
    with filled(tmp_path / "a", RECORDS[:1]) as spool:
        train, val = spool.split(spool.choose([(1.0, None)]), 0.5)
        assert (len(train), len(val)) == (1, 0)
