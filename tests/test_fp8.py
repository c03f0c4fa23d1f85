"""The tiled float8 conversion beside PyTorch's own."""

import numpy as np
import pytest
import torch

from eagle3_utils.states.shards import fp8


def by_torch(states: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    values = states.float()
    largest = values.abs().amax(dim=-1)
    scale = torch.where(largest > 0, largest / 448.0, torch.ones_like(largest))
    return (values / scale.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8).numpy(), scale.numpy()


def values_of(codes: np.ndarray) -> np.ndarray:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()


def test_every_code_comes_back_as_pytorch_reads_it():
    codes = np.arange(256, dtype=np.uint8)[~np.isin(np.arange(256), (0x7F, 0xFF))]
    want = torch.from_numpy(codes).view(torch.float8_e4m3fn).float()
    for scale in (1.0, 0.37, 3e-39, 1e30):
        got = fp8.from_fp8(codes[None], np.array([scale], np.float32))[0]
        assert torch.equal(got, (want * torch.tensor(scale)).bfloat16())


@pytest.mark.parametrize("size", [1e-38, 1.0, 1e35])
def test_it_is_pytorchs_cast_but_for_neighbours_of_ties(size):
    states = (torch.randn(300, 3, 64, generator=torch.Generator().manual_seed(0)) * size).bfloat16()
    states[:, 0] *= 0.001
    states[7] = 0
    (codes, scales), (want, want_scales) = fp8.to_fp8(states), by_torch(states)
    assert np.array_equal(scales, want_scales) and codes.dtype == np.uint8
    differ = codes != want
    assert differ.mean() < 0.005 and np.abs(codes.astype(int) - want.astype(int)).max() <= 1
    exact, scale = states.double().numpy(), scales.astype(np.float64)[..., None]
    error, nearest = (np.abs(values_of(some) * scale - exact) for some in (codes, want))
    assert (error <= nearest * (1 + 2**-5)).all()  # the other neighbour is as near


def test_tiles_do_not_change_the_result(monkeypatch):
    states = torch.randn(50, 2, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = fp8.to_fp8(states)
    back = fp8.from_fp8(*whole)
    monkeypatch.setattr(fp8, "_TILE", 7 * 16)
    tiled = fp8.to_fp8(states)
    assert all(np.array_equal(one, two) for one, two in zip(whole, tiled, strict=True))
    assert torch.equal(fp8.from_fp8(*tiled), back) and back.shape == states.shape


@pytest.mark.parametrize("tile", [1 << 24, 5 * 64])
def test_pytorchs_way_on_any_device_gives_the_same_bits(tile, monkeypatch):
    states = torch.randn(40, 3, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    states[7], states[8, 1] = 0, -0.0
    states[:, 0, 1:] *= 1e-3  # beside one large value: subnormal codes
    codes, scales = fp8.to_fp8(states)
    assert ((codes & 0x7F > 0) & (codes & 0x7F < 8)).any()
    scales[9] = (3e-39, 2e35, 0.37)
    monkeypatch.setattr(fp8, "_DEVICE_TILE", tile)
    for some in (slice(None), slice(0, 1), slice(0, 0)):
        got = fp8.from_fp8_on_device(torch.from_numpy(codes[some]), torch.from_numpy(scales[some]))
        assert got.dtype == torch.bfloat16 and got.shape == codes[some].shape
        assert torch.equal(got.view(torch.uint16), fp8.from_fp8(codes[some], scales[some]).view(torch.uint16))


def test_nothing_and_single_rows():
    codes, scales = fp8.to_fp8(torch.zeros(0, 3, 8).bfloat16())
    assert codes.shape == (0, 3, 8) and scales.shape == (0, 3)
    assert fp8.from_fp8(codes, scales).shape == (0, 3, 8) and fp8.count_not_finite_fp8(codes, scales) == 0
    codes, scales = fp8.to_fp8(torch.tensor([[-3.0, 0.0]]).bfloat16())
    assert codes.tolist() == [[0xFE, 0x00]] and scales == np.float32(3 / 448)


def test_values_that_are_not_finite_are_counted():
    codes, scales = fp8.to_fp8(torch.randn(4, 3, 8).bfloat16())
    assert fp8.count_not_finite_fp8(codes, scales) == 0
    codes[1, 2, 3], codes[0, 0, 0] = 0x7F, 0xFF
    scales[3, 1] = np.inf
    assert fp8.count_not_finite_fp8(codes, scales) == 2 + 8
