"""Figures of notebook 03 (plots/states.py)."""

import numpy as np
import torch
from fake_capture import make_records, sample_of

from eagle3_utils.plots import states as plots
from eagle3_utils.states.codec import measure_codec
from eagle3_utils.states.sizes import CorpusNumbers, state_bytes


def test_store_size_stacks_the_tensors_and_marks_the_free_disk():
    corpus = CorpusNumbers(num_samples=100, num_tokens=2**20, num_final_rows=2**19, longest=512)
    axes = plots.store_size(corpus, 576, 3, disk_free_bytes=5 << 30).axes[0]
    tops = [bar.get_y() + bar.get_height() for bar in axes.containers[-1]]
    expected = [
        sum(state_bytes(corpus, 576, 3, codec, final).values()) / 2**30
        for codec in ("bf16", "fp8")
        for final in ("all", "supervised")
    ]
    assert np.allclose(tops, expected) and "GiB" in axes.get_ylabel()
    assert axes.lines[0].get_ydata()[0] == 5.0


def test_codec_errors_draws_every_state_sorted_in_percent():
    samples = [sample_of(record) for record in make_records(20)]
    report = measure_codec(samples, "fp8", [1, 2, 3], lambda final: final.float())
    axes = plots.codec_errors(report).axes[0]
    assert [line.get_label() for line in axes.lines] == ["layer 1", "layer 2", "layer 3", "final"]
    for line, worst in zip(axes.lines, report.worst_relative_error, strict=True):
        heights = line.get_ydata()
        assert (np.diff(heights) >= 0).all() and np.isclose(heights[-1], 100 * worst)
    assert torch.tensor(report.worst_relative_error).max() < 0.05


def test_throughput_draws_one_line_per_store():
    axes = plots.throughput({"train": [(0.0, 0.0), (2.0, 900.0)], "val": []}).axes[0]
    assert len(axes.lines) == 1 and axes.lines[0].get_ydata().tolist() == [0.0, 900.0]
