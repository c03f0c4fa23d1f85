"""Float8 e4m3 with one float32 scale per row, encoded and decoded in cache-sized tiles.

PyTorch converts to and from float8 one value at a time on the CPU. Its conversions to and from float16 are vectorised,
and a float16 scaled by 2⁻⁸ holds an e4m3 number in its leading bits: same sign, exponents that line up (subnormal ones
too), three leading bits of mantissa. So seven bits are rounded away, to even; the way back is exact. Beside PyTorch's
own cast, two in a thousand values that lie next to a tie go to the other neighbour.
"""

from __future__ import annotations

import numpy as np
import torch

FP8_MAX = 448.0  # largest finite e4m3
_TILE = 1 << 18  # values at a time: small enough for caches, large enough that threads seldom meet in Python
_DEVICE_TILE = 1 << 24  # the same on a GPU: 64 MiB of float32, about 800 tokens of three layers of 7,168
_SHIFT = 256.0  # 2⁸ between the exponents of e4m3 and float16


def to_fp8(states: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """bf16 [..., H] → uint8 bits [..., H] and float32 scales [...]; a row's largest value becomes ±448.

    The values must be finite.
    """
    hidden = states.shape[-1]
    rows = states.reshape(-1, hidden).contiguous()
    codes, step = np.empty(rows.shape, np.uint8), max(1, _TILE // max(1, hidden))
    scales = _scales(rows)
    divisors, size = (scales * _SHIFT).unsqueeze(-1), min(step, len(rows))
    wide, half = torch.empty(size, hidden), torch.empty(size, hidden, dtype=torch.float16)
    first, second = np.empty((size, hidden), np.uint16), np.empty((size, hidden), np.uint16)
    for start in range(0, len(rows), step):
        tile = rows[start : start + step]
        x, h, a, b = wide[: len(tile)], half[: len(tile)], first[: len(tile)], second[: len(tile)]
        x.copy_(tile)
        h.copy_(x.div_(divisors[start : start + step]))
        bits = h.view(torch.uint16).numpy()
        np.right_shift(bits, 7, out=a)
        np.bitwise_and(a, 1, out=a)
        np.add(a, 0x3F, out=a)
        np.add(a, bits, out=a)
        np.right_shift(a, 7, out=a)  # sign in bit 8, magnitude in bits 0 to 6
        np.right_shift(a, 1, out=b)
        np.bitwise_and(b, 0x80, out=b)
        np.bitwise_or(a, b, out=a)
        np.copyto(codes[start : start + step], a, casting="unsafe")
    return codes.reshape(states.shape), scales.numpy().reshape(states.shape[:-1])


def _scales(rows: torch.Tensor) -> torch.Tensor:
    """float32 [N]: the largest magnitude of each row / 448, or 1 for a row of zeros.

    Of 16 bit numbers the largest positive one is the largest as int16, the largest negative one the largest as uint16.
    """
    if not rows.numel():
        return torch.ones(len(rows))
    bits = rows.view(torch.uint16).numpy()
    positive, negative = bits.view(np.int16).max(axis=-1), bits.max(axis=-1)
    largest = np.maximum(np.maximum(positive, 0), np.where(negative >= 0x8000, negative & 0x7FFF, 0).astype(np.int16))
    values = torch.from_numpy(largest).view(torch.bfloat16).float() / FP8_MAX
    return torch.where(values > 0, values, torch.ones_like(values))


def from_fp8(codes: np.ndarray, scales: np.ndarray) -> torch.Tensor:
    """uint8 bits [..., H] and scales [...] → bf16 [..., H]: e4m3 value × scale, rounded once."""
    hidden = codes.shape[-1]
    flat, factors = codes.reshape(-1, hidden), np.ascontiguousarray(scales, np.float32).reshape(-1)
    factors = torch.from_numpy(factors) * _SHIFT
    out, step = torch.empty(flat.shape, dtype=torch.bfloat16), max(1, _TILE // max(1, hidden))
    size = min(step, len(flat))
    wide = torch.empty(size, hidden)
    first, second = np.empty((size, hidden), np.uint16), np.empty((size, hidden), np.uint16)
    for start in range(0, len(flat), step):
        tile = flat[start : start + step]
        x, a, b = wide[: len(tile)], first[: len(tile)], second[: len(tile)]
        np.copyto(a, tile)
        np.left_shift(a, 7, out=a)
        np.bitwise_and(a, 0x4000, out=b)  # the sign, one bit too low
        np.add(a, b, out=a)  # carries it up
        x.copy_(torch.from_numpy(a).view(torch.float16))
        torch.mul(x, factors[start : start + step].unsqueeze(-1), out=x)
        out[start : start + step].copy_(x)
    return out.reshape(codes.shape)


def from_fp8_on_device(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 bits [..., H] and scales [...] on any one device → bf16 [..., H] there, with PyTorch's own cast.

    The same bits as from `from_fp8` for every finite code, which is several times faster on the CPU.
    """
    hidden = codes.shape[-1]
    rows, factors = codes.reshape(-1, hidden).view(torch.float8_e4m3fn), scales.reshape(-1, 1)
    out, step = torch.empty_like(rows, dtype=torch.bfloat16), max(1, _DEVICE_TILE // max(1, hidden))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        torch.mul(rows[part].float(), factors[part], out=out[part])
    return out.reshape(codes.shape)


def count_not_finite_fp8(codes: np.ndarray, scales: np.ndarray) -> int:
    """Number of values that would not be finite: those with the code of NaN, and whole rows without a finite scale."""
    if not codes.size:
        return 0
    bad = ~np.isfinite(scales)
    nan = np.count_nonzero(codes == 0x7F) + np.count_nonzero(codes == 0xFF)
    return int(nan) + int(np.count_nonzero(bad)) * codes.shape[-1]
