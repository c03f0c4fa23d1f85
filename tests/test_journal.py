"""The journal: append only, the last entry of a step counts, a torn line is passed over."""

from eagle3_utils.draft.training.journal import Journal, read_journal


def test_entries_come_back_by_kind_and_step_and_the_last_counts(tmp_path):
    with Journal(tmp_path, "run") as journal:
        journal.write("train", 2, loss=1.5, accuracy=[0.1, 0.2])
        journal.write("validation", 2, accept_length=1.4)
    with Journal(tmp_path, "run") as journal:  # resumed from step 1: step 2 again
        journal.write("train", 1, loss=2.0)
        journal.write("train", 2, loss=1.25)
    assert [(entry["step"], entry["loss"]) for entry in read_journal(tmp_path, "train")] == [(1, 2.0), (2, 1.25)]
    assert read_journal(tmp_path, "validation")[0]["accept_length"] == 1.4
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_line_cut_short_by_a_kill_is_passed_over(tmp_path):
    with Journal(tmp_path, "run") as journal:
        journal.write("train", 1, loss=2.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    assert len(read_journal(tmp_path, "train")) == 1


def test_tensorboard_files_are_written(tmp_path):
    with Journal(tmp_path, "run") as journal:
        journal.write("train", 1, loss=2.0)
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_no_journal_yet_reads_as_empty(tmp_path):
    assert read_journal(tmp_path, "train") == []
