"""Figures of notebooks 02, 05 and 06 and the shared style: what is drawn is what was given."""

import numpy as np
import pytest
from matplotlib.figure import Figure

from eagle3_utils.acceptance.intervals import Interval
from eagle3_utils.plots import acceptance, serving, stats, style
from eagle3_utils.stats import LayerStatistics, StateStatistics


def rising(*values):
    return [Interval(value, value - 0.1, value + 0.1) for value in values]


def heights(figure):
    return [patch.get_height() for patch in figure.axes[0].patches]


SUMMARY = {
    source: {
        "num_samples": 7,
        "conditional": rising(0.6, 0.5), "accuracy": rising(0.6, 0.4), "baseline": rising(0.1, 0.1),
        "overlap": rising(0.5, 0.4), "out_of_vocab": rising(0.2, 0.2),
    }
    for source in ("all", "chat")
}  # fmt: skip


@pytest.mark.parametrize("name", ["conditional", "accuracy", "overlap", "out_of_vocab"])
def test_a_line_per_source_with_its_values(name):
    figure = acceptance.by_step(SUMMARY, name, baseline=name == "accuracy")
    lines = figure.axes[0].lines
    assert [line.get_label() for line in lines][:2] == ["all (7 samples)", "chat (7 samples)"]
    assert list(lines[0].get_ydata()) == [interval.value for interval in SUMMARY["all"][name]]
    assert len(lines) == (3 if name == "accuracy" else 2)


def test_bars_and_whiskers_are_the_intervals_and_a_missing_source_is_a_gap():
    figure = acceptance.accept_length_by_source(
        {"decoded": {"all": Interval(2.0, 1.8, 2.4)}, "served": {"code": Interval(1.5, 1.2, 1.6)}}
    )
    drawn = heights(figure)
    assert drawn[0] == 2.0 and np.isnan(drawn[1]) and drawn[3] == 1.5
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["all", "code"]


def test_histogram_is_in_shares_and_shapes_keep_their_order():
    assert heights(acceptance.accepted_histogram([3, 1, 0, 0])) == [0.75, 0.25, 0, 0]
    figure = acceptance.accept_length_by_shape({"3 · 1 · 4": Interval(2, 2, 2), "1 · 1 · 2": Interval(1.5, 1.5, 1.5)})
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["3 · 1 · 4", "1 · 1 · 2"]


def test_served_speed_has_a_line_per_draft():
    rows = [{"draft": d, "concurrency": c, "tokens/s": c * 10.0} for d in ("no draft", "3 · 1 · 4") for c in (1, 8)]
    lines = acceptance.served_speed(rows).axes[0].lines
    assert [line.get_label() for line in lines] == ["no draft", "3 · 1 · 4"]
    assert list(lines[0].get_ydata()) == [10.0, 80.0]


def test_nothing_decoded_still_gives_figures():
    """Without reference decoding the notebook draws empty figures instead of failing."""
    for figure in (
        acceptance.accept_length_by_source({"decoded": {}, "simulated": {}}),
        acceptance.accepted_histogram([0, 0, 0, 0]),
        acceptance.accept_length_by_shape({}),
        acceptance.served_speed([]),
    ):
        assert isinstance(figure, Figure) and figure._repr_png_()[0].startswith(b"\x89PNG")


@pytest.fixture
def statistics():
    layers = [
        LayerStatistics(
            name=name, num_rows=8, num_nonfinite_rows=0, num_nonfinite_values=0, num_massive_rows=1, median_entry=1.0,
            norm_quantiles=[1.0, 1.5, 2.0, 2.5, 9.0], norm_by_position=[9.0, 2.0, float("nan")],
            peak_by_position=[450.0, 3.0, float("nan")], massive=[],
            variance_H=np.array([1.0, 4.0, 2.0, 0.5]), eigenvalues=np.array([0.5, 0.3, 0.2]),
            effective_rank=2.8, effective_rank_with_massive=2.9, dimensions_for_90_percent=3,
        )
        for name in ("layer 1", "final")
    ]  # fmt: skip
    return StateStatistics(layers, np.array([[1.0, 0.3], [0.3, 1.0]]), [0, 1, 2, 4], 2, 8, 100.0)


def test_every_figure_of_notebook_06_draws_each_state(statistics):
    norms = stats.norms_by_position(statistics).axes[0]
    assert [line.get_label() for line in norms.lines] == ["layer 1", "final"]
    assert [text.get_text() for text in norms.get_xticklabels()] == ["0", "1", "2–3"]
    assert list(stats.variance_by_dimension(statistics).axes[0].lines[0].get_ydata()) == [4.0, 2.0, 1.0, 0.5]
    assert list(stats.spectrum(statistics).axes[0].lines[0].get_ydata()) == pytest.approx([0.5, 0.8, 1.0])
    peaks = stats.peaks_by_position(statistics).axes[0].lines
    assert list(peaks[0].get_ydata())[:2] == [450.0, 3.0] and peaks[2].get_ydata()[0] == 100.0
    assert "0.30" in [text.get_text() for text in stats.cosine_between_states(statistics).axes[0].texts]
    assert stats.norm_distribution(statistics)._repr_png_()[0].startswith(b"\x89PNG")


def test_a_legend_stands_beside_the_axes_and_inside_the_figure():
    cosines = {"aux[0]": [0.2, 1.0, 0.9], "final": [0.1, 0.2, 1.0]}
    figure = serving.layer_match(cosines, [1, 2])
    ax = figure.axes[0]
    assert [line.get_xdata()[0] for line in ax.lines if line.get_label() not in cosines] == [1, 2]
    figure.canvas.draw()
    box = ax.get_legend().get_window_extent()
    assert ax.get_window_extent().x1 <= box.x0 < box.x1 <= figure.bbox.x1


def test_series_differ_without_colour():
    looks = [style.series(index) for index in range(4)]
    assert len({(look["marker"], look["linestyle"]) for look in looks}) == 4
    assert len({style.bar(index)["hatch"] for index in range(4)}) == 4


def test_figures_are_saved_under_their_names(tmp_path):
    figure, ax = style.figure("t", "x (s)", "y (tokens)")
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("x (s)", "y (tokens)")
    assert [path.name for path in style.save([("one", figure)], tmp_path / "new")] == ["one.png"]
    assert (tmp_path / "new" / "one.png").stat().st_size > 1000
    _, axes = style.figure("panels", columns=2, rows=1)
    assert axes.shape == (1, 2)
