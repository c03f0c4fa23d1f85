import torch
from fake_capture import HIDDEN, FakeServer, make_records, store_meta

from eagle3_utils.config import ExtractConfig
from eagle3_utils.states.extraction.codec_pilot import choose_pilot, run_pilot

CONFIG = ExtractConfig(max_tokens_in_flight=300, min_free_bytes=0, num_pilot_samples=8)


def test_the_pilot_spans_the_lengths_and_holds_the_longest():
    records = make_records(100)
    chosen = choose_pilot(records, 10)
    lengths = sorted(len(record.input_ids) for record in records)
    picked = sorted(len(record.input_ids) for record in chosen)
    assert len(chosen) == 10 and picked[-1] == lengths[-1] and picked[0] <= lengths[15]
    assert choose_pilot(records[:3], 10) and len(choose_pilot(records[:3], 10)) == 3


def test_every_codec_is_judged_and_nothing_stays(tmp_path):
    head = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(0))
    with FakeServer(tmp_path / "dumps") as server:
        report = run_pilot(
            [server],
            make_records(50),
            tmp_path / "pilot",
            store_meta(codec="fp8"),
            CONFIG,
            lambda x: x.float() @ head.T,
        )
    assert not (tmp_path / "pilot").exists()
    assert report.codecs["bf16"].mean_kl == 0.0 and 0 < report.codecs["fp8"].mean_kl < 0.02
    assert report.extraction.num_samples == 8
    low, high = report.rate()
    assert 0 < low < report.extraction.tokens_per_second < high
    assert len(report.rows()) == 2 * 4 and set(report.metrics()["codecs"]) == {"bf16", "fp8"}
