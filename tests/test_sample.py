import numpy as np
import pytest
import torch
from fake_capture import HIDDEN, make_records, states_of, store_meta

from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.shards.sample import select_rows
from eagle3_utils.states.shards.verify import verify_store
from eagle3_utils.states.store import Sample, StoreWriter


@pytest.fixture
def records():
    return make_records(60)


def test_a_sample_without_supervised_rows_is_stored(tmp_path):
    aux, final = states_of([1, 2])
    with StoreWriter(tmp_path, store_meta(codec="fp8", final="supervised")) as writer:
        writer.add(Sample("a", np.array([1, 2], np.int32), np.array([1, 0], np.uint8), aux, final))
    assert StoreReader(tmp_path).read(0).final.shape == (0, HIDDEN)
    assert verify_store(tmp_path, deep=True).ok


def test_rows_side_by_side_are_taken_without_a_copy():
    states = torch.arange(12).reshape(6, 2).bfloat16()
    for wanted in ([0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1], [0] * 6, [0, 0, 0, 0, 0, 1]):
        mask = np.array(wanted, bool)
        assert torch.equal(select_rows(states, mask), states[torch.from_numpy(mask)])
    run = select_rows(states, np.array([0, 0, 1, 1, 1, 0], bool))
    assert run.data_ptr() == states[2].data_ptr()


def test_compact_codec_takes_at_most_045_of_bf16(tmp_path):
    """Half the tokens supervised, H = 576: fp8 + supervised ≤ 0.45 × bf16 × 4 states."""
    rng = np.random.default_rng(0)
    sizes = {}
    for codec, final in (("bf16", "all"), ("fp8", "supervised")):
        with StoreWriter(tmp_path / codec, store_meta(hidden_size=576, codec=codec, final=final)) as writer:
            for number in range(10):
                mask = (np.arange(200) % 2).astype(np.uint8)
                aux, last = torch.randn(200, 3, 576).bfloat16(), torch.randn(200, 576).bfloat16()
                writer.add(Sample(str(number), rng.integers(0, 9, 200).astype(np.int32), mask, aux, last))
        sizes[codec] = (tmp_path / codec / "shard-000000.h5").stat().st_size
    assert sizes["fp8"] <= 0.45 * sizes["bf16"]
