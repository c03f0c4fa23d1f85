"""report.html: one page from whatever is done; figures inside it, links beside it, nothing that runs or is fetched."""

from __future__ import annotations

import base64
import json
import re

import pytest

from eagle3_utils import run_report
from eagle3_utils.runs import write_json

VERSIONS = {"sglang": "0.5.14", "python": "3.12.0"}


def interval(value):
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def by_step(*values):
    return [interval(value) for value in values]


EVALUATION = {
    "accept_length": 1.46, "accept_length_interval": interval(1.46), "accept_length_by_source": {"chat": 1.5},
    "accept_length_from": "decoded", "identical": True, "num_prompts": 4, "shape": [3, 1, 4],
    "accept_lengths": {"decoded": {"all": interval(1.46), "chat": interval(1.5)}},
    "replayed": {"1 · 1 · 2": interval(1.3)},
    "teacher_forced": {"all": {"num_samples": 4, "supervised": [10, 8]} | {
        name: by_step(0.5, 0.25)
        for name in ("accuracy", "conditional", "overlap", "out_of_vocab", "baseline", "accept_length")
    }},
    "served": [{"draft": "no draft", "concurrency": 1, "tokens/s": 100.0, "speed-up": 1.0},
               {"draft": "3 · 1 · 4", "concurrency": 1, "tokens/s": 150.0, "speed-up": 1.5, "counted": 1.44}],
    "served_left_out": None, "served_changes": [{"compared": "3 · 1 · 4, 1 in flight", "changed": 2}],
    "served_accept_lengths": {"3 · 1 · 4, 1 in flight": {"code": {"counted": interval(1.71), "total": interval(1.9)}}},
    "parity": {"left_out": None, "offline": [0.5, 0.25], "served": [0.4, 0.1], "passed": False, "tolerance": 0.02,
               "causes": ["lm_head is <missing>"], "mismatch": 0.25,
               "trials": [{"fault": "lm_head is <missing>", "distance": 0.01, "mismatch": 0.02}]},
}  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run whose stages 01, 02, 04 and 05 are done."""
    folder = tmp_path_factory.mktemp("reported") / "my-run"
    metrics = {
        "01_merge_data": {"num_samples": 10, "num_tokens": 1234, "supervised_share": 0.5,
                          "counts": {"train": {"samples": 9, "tokens": 1000}},
                          "statistics": [{"source": "chat & co", "samples": 10, "tokens": 1234}],
                          "draft_vocab_coverage": {"8192": 0.99}, "draft_vocab_coverage_held_out": {"8192": 0.875}},
        "02_patch_and_probe": {"num_gates": 1, "passed": False},
        "04_train_draft": {"validation_accuracy": [0.5, 0.25], "baseline_accuracy": 0.05, "accept_length": 1.6,
                           "report": {"steps": 4, "validation": {
                               name: [0.5, 0.25] for name in ("accuracy", "conditional", "overlap", "baseline")}
                               | {"accept_length": 1.6}}},
        "05_evaluate_acceptance": EVALUATION,
    }  # fmt: skip
    for stage, values in metrics.items():
        write_json(folder / stage / "metrics.json", values)
        write_json(folder / stage / "DONE.json", {
            "config": {"model": "example"}, "inputs": {"corpus": "0123456789abcdef", "draft": "feedbeef"},
            "outputs": {"draft": "feedbeef"},
            "versions": VERSIONS, "wall_seconds": 12.5, "config_hash": "cafebabe11", "data": str(folder / "data"),
        })  # fmt: skip
    gate = {"name": "layers", "measured": "cosine 0.97", "threshold": "0.99", "verdict": "fail"}
    write_json(folder / "02_patch_and_probe" / "probe.json", {"gates": [gate]})
    (folder / "04_train_draft" / "notebook.ipynb").touch()
    (folder / "04_train_draft" / "parameters.yaml").touch()
    (folder / "05_evaluate_acceptance" / "notebook.html").touch()
    journal = folder / "data" / "draft" / "metrics.jsonl"
    journal.parent.mkdir(parents=True)
    train = {"kind": "train", "step": 1, "loss": 2.0, "learning_rate": 1e-3, "grad_norm": 1.0, "tokens_per_second": 9.0}
    train |= {"wait_share": 0.1, "accuracy": [0.4, 0.2]}
    validation = {"kind": "validation", "step": 1, "accuracy": [0.5, 0.25], "accept_length": 1.6}
    journal.write_text(f"{json.dumps(train)}\n{json.dumps(validation)}\n")
    return folder


@pytest.fixture(scope="module")
def page(run_folder):
    return run_report.write_report(run_folder).read_text()


def test_the_page_has_every_section_that_is_done_its_figures_and_its_links(page):
    titles = re.findall("<h2>(.*?)</h2>", page)
    assert [title.split(":")[0] for title in titles] == ["Lineage", "Corpus", "Probe", "Training", "Acceptance"]
    assert page.count("data:image/svg+xml;base64,") == 7
    assert 'href="04_train_draft/notebook.ipynb"' in page and 'href="05_evaluate_acceptance/notebook.html"' in page
    for words in (
        "chat &amp; co", "cosine 0.97", '<td class="bad">fail</td>', "corpus 01234567", "draft feedbeef",
        "1.460 [1.360, 1.560]", "FAILED</span> explained by: lm_head is &lt;missing&gt;", "accepted at least", "0.4",
        "25.0% of the verifications", "1.710 [1.610, 1.810]", "<td>87.50%</td>", 'alt="Training"',
    ):  # fmt: skip
        assert words in page, words


def test_the_page_stands_alone(run_folder, page):
    figures = [base64.b64decode(data).decode() for data in re.findall(r"svg\+xml;base64,([^\"]+)", page)]
    for text in (page, *figures):
        assert not re.search(r"""<(script|link|iframe)|@import|url\((?!["']?#)|(src|href)=["'](\w+:)?/""", text)
    links = re.findall(r'href="([^"]+)"', page)
    assert len(links) == 3 and all((run_folder / link).is_file() for link in links)
    assert "@media print" in page
    assert [path.name for path in run_folder.iterdir() if path.is_file()] == ["report.html"]


def test_what_was_left_out_is_said(run_folder, page, monkeypatch):
    monkeypatch.setattr(run_report, "svg_uri", lambda figure: "")
    left_out = {"served_left_out": "no CUDA GPU here", "parity": {"left_out": "no CUDA GPU here"}, "served": []}
    write_json(run_folder / "05_evaluate_acceptance" / "metrics.json", EVALUATION | left_out)
    page = run_report.write_report(run_folder).read_text()
    assert "Left out: no CUDA GPU here." in page and "tolerance" not in page


def test_a_figure_that_other_records_cannot_give_is_said_to_be_missing():
    assert "No figure from these records: KeyError: &#x27;speed&#x27;" in run_report._figure(lambda: {}["speed"])


def test_a_run_without_any_finished_stage_has_a_page_too(tmp_path):
    assert "No stage of this run is done yet." in run_report.write_report(tmp_path).read_text()


def test_table_keeps_the_order_of_columns_and_marks_numbers():
    found = run_report.table([{"a": 1234, "b": "x<y"}, {"b": True, "c": 0.123456}])
    assert re.findall("<th>(.*?)</th>", found) == ["a", "b", "c"]
    assert '<td class="number">1,234</td><td>x&lt;y</td>' in found and "<td>yes</td>" in found and "0.1235" in found
    assert run_report.table([]) == ""
