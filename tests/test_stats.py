"""Hidden-state statistics against figures worked out by hand or by NumPy on the whole arrays."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from eagle3_utils import stats
from eagle3_utils.errors import UserError


class FakeReader:
    """Samples in memory with the reader's interface: two auxiliary layers and a final state on some rows."""

    def __init__(self, samples, layers=(1, 4)):
        self.samples = samples
        self.meta = SimpleNamespace(aux_layers=list(layers), hidden_size=samples[0].aux.shape[2])
        self.lengths = [len(sample.input_ids) for sample in samples]

    def __len__(self):
        return len(self.samples)

    def read(self, index):
        return self.samples[index]


def make_sample(name, aux, final_rows=None, final=None):
    aux = torch.as_tensor(aux, dtype=torch.bfloat16)
    num_tokens = aux.shape[0]
    final_rows = np.ones(num_tokens, bool) if final_rows is None else np.asarray(final_rows, bool)
    final = aux[:, -1][torch.from_numpy(final_rows)] if final is None else torch.as_tensor(final, dtype=torch.bfloat16)
    return SimpleNamespace(id=name, input_ids=np.arange(num_tokens) + 100, aux=aux, final=final, final_rows=final_rows)


@pytest.fixture
def random_reader():
    generator = torch.Generator().manual_seed(1)
    return FakeReader(
        [make_sample(f"s{n}", torch.randn(length, 2, 8, generator=generator)) for n, length in enumerate((5, 17, 40))]
    )


def test_variance_and_norms_equal_numpy_over_all_rows(random_reader):
    result = stats.state_statistics(random_reader)
    rows = torch.cat([sample.aux[:, 0] for sample in random_reader.samples]).float().numpy()
    layer = result.layers[0]
    np.testing.assert_allclose(layer.variance_H, rows.var(0), atol=1e-6)
    norms = np.linalg.norm(rows, axis=1)
    assert layer.norm_quantiles[2] == pytest.approx(np.median(norms), rel=1e-6)
    assert layer.num_rows == 62 == result.num_tokens


def test_spectrum_equals_numpy_covariance_eigenvalues_with_more_and_with_fewer_rows_than_dimensions():
    for shape in ((50, 6), (4, 6)):
        rows = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        expected = np.sort(np.linalg.eigvalsh(np.cov(rows.T)))[::-1].clip(0)
        found = stats.spectrum(rows)
        np.testing.assert_allclose(found, (expected / expected.sum())[: len(found)], atol=1e-6)


def test_effective_rank_of_equal_eigenvalues_is_their_number_and_of_one_is_one():
    assert stats.effective_rank(np.full(7, 1 / 7)) == pytest.approx(7)
    assert stats.effective_rank([1.0, 0.0, 0.0]) == pytest.approx(1)


def test_norms_by_position_fall_into_buckets_of_powers_of_two():
    assert stats.position_edges(9) == [0, 1, 2, 4, 8, 16]
    aux = np.zeros((5, 1, 4))
    aux[:, 0, 0] = [10, 1, 2, 4, 3]  # positions 2 and 3 share a bucket
    result = stats.state_statistics(FakeReader([make_sample("a", aux)], layers=[1]))
    assert result.layers[0].norm_by_position[:4] == [10, 1, 3, 3]


def test_a_massive_token_is_found_with_its_place_and_left_out_of_the_spectrum():
    aux = np.random.default_rng(0).normal(size=(64, 1, 16))
    aux[3, 0, 5] = -4096.0
    result = stats.state_statistics(FakeReader([make_sample("a", aux)], layers=[7]), massive_ratio=1000)
    worst = result.layers[0].massive[0]
    assert (worst.state, worst.sample_id, worst.position, worst.token_id, worst.dimension, worst.value) == (
        "layer 7", "a", 3, 103, 5, -4096.0,
    )  # fmt: skip
    rows = torch.as_tensor(aux[:, 0], dtype=torch.bfloat16).float().numpy()
    median = np.median(np.median(np.abs(rows), axis=1))
    assert worst.ratio == pytest.approx(4096 / median, rel=1e-6)
    layer = result.layers[0]
    assert layer.peak_by_position[2] == worst.ratio  # positions 2 and 3 share a bucket
    assert layer.peak_by_position[0] == pytest.approx(np.abs(rows[0]).max() / median, rel=1e-6)
    assert [layer.num_massive_rows for layer in result.layers] == [1, 1]
    assert [(row["state"], row["position"], row["dimension"], row["listed"]) for row in result.massive_table()] == [
        ("layer 7", 3, 5, 1), ("final", 3, 5, 1),
    ]  # fmt: skip
    assert layer.effective_rank_with_massive == pytest.approx(1, abs=0.05)
    assert layer.effective_rank > 10


def test_cosine_between_states_is_taken_on_the_same_token():
    aux = np.zeros((3, 2, 2))
    aux[:, 0] = [[1, 0], [0, 1], [1, 0]]
    aux[:, 1] = [[1, 0], [1, 0], [-1, 0]]  # cosines 1, 0, -1
    sample = make_sample("a", aux, final_rows=[False, True, True], final=[[0, 2], [3, 0]])  # with layer 0: 1, 1
    cosine = stats.state_statistics(FakeReader([sample])).cosine_KK
    np.testing.assert_allclose(cosine, [[1, 0, 1], [0, 1, -0.5], [1, -0.5, 1]], atol=1e-6)


def test_non_finite_rows_are_counted_and_stay_out_of_the_figures():
    aux = np.ones((4, 2, 3))
    aux[1, 0, 2] = np.nan
    aux[2, 1, :] = np.inf
    result = stats.state_statistics(FakeReader([make_sample("a", aux)]))
    assert [layer.num_nonfinite_values for layer in result.layers] == [1, 3, 3]
    assert [layer.num_rows for layer in result.layers] == [3, 3, 3]
    assert result.num_nonfinite_values == 7
    assert result.layers[0].norm_quantiles[2] == pytest.approx(np.sqrt(3), rel=1e-5)


def test_raw_bf16_bits_and_torch_bf16_give_the_same_rows():
    values = torch.randn(4, 3).to(torch.bfloat16)
    bits = values.view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(stats.float_rows(bits), values.float().numpy())


def test_the_chosen_samples_depend_on_the_seed_only_and_the_json_is_plain(random_reader):
    first = stats.state_statistics(random_reader, num_samples=2, seed=3).to_json()
    again = stats.state_statistics(random_reader, num_samples=2, seed=3).to_json()
    assert first == again == json.loads(json.dumps(first))
    assert first["num_samples"] == 2


def test_more_non_finite_values_than_allowed_stop_with_the_state_named():
    aux = np.ones((4, 2, 3))
    aux[1, 0, 2] = np.nan
    result = stats.state_statistics(FakeReader([make_sample("a", aux)]))
    stats.require_finite(result, allowed=1)
    with pytest.raises(UserError, match=r"1 values are not finite \(layer 1: 1, layer 4: 0"):
        stats.require_finite(result)
