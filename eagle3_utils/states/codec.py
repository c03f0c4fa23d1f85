"""How hidden states are stored, and how much that changes them.

`bf16` keeps the bits. `fp8` is float8 e4m3 with one float32 scale per token and layer: early layers carry massive
activations, so a scale shared between layers would flush the others to zero. Independently of that, the final state
may be kept for `supervised` rows only: row r is the teacher of token r+1, so nothing else is ever read.

Legend: T tokens, L auxiliary layers, H hidden, M rows with a final state, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import numpy as np
import torch

from eagle3_utils.errors import UserError
from eagle3_utils.states.shards.fp8 import count_not_finite_fp8, from_fp8, to_fp8

CODECS = ("bf16", "fp8")
FINALS = ("all", "supervised")


def supervised_rows(loss_mask: np.ndarray) -> np.ndarray:
    """Rows whose prediction is supervised: bool [T], true at r when `loss_mask[r + 1]` is 1. The last row never is."""
    rows = np.zeros(len(loss_mask), dtype=bool)
    rows[:-1] = loss_mask[1:] != 0
    return rows


def encode(states: torch.Tensor, codec: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Turn bf16 states [..., H] into what is stored: uint16 bits, or uint8 e4m3 bits and float32 scales [...].

    With `bf16` the result is a view of `states`, not a copy.
    """
    if codec == "bf16":
        return states.contiguous().view(torch.uint16).numpy(), None
    return to_fp8(states)


def decode(stored: np.ndarray, scale: np.ndarray | None) -> torch.Tensor:
    """Turn stored bits back into bf16 [..., H]. Without a scale the result shares memory with `stored`."""
    if scale is None:
        return torch.from_numpy(stored).view(torch.bfloat16)
    return from_fp8(stored, scale)


def round_trip(states: torch.Tensor, codec: str) -> torch.Tensor:
    """What a reader would get back for these bf16 states."""
    return decode(*encode(states, codec))


def count_not_finite(states: torch.Tensor) -> int:
    """Number of NaN and infinite values in a bf16 tensor; the usual answer, 0, costs two passes and no copy.

    A bf16 with all exponent bits set is 0x7f80 or more as a positive int16, 0xff80 or more as an uint16.
    """
    if states.numel() == 0:
        return 0
    bits = states.contiguous().view(torch.uint16).numpy()
    if bits.view(np.int16).max() < 0x7F80 and bits.max() < 0xFF80:
        return 0
    return int((~torch.isfinite(states)).sum())


def count_not_finite_stored(stored: np.ndarray, scale: np.ndarray | None) -> int:
    """Number of values, as stored, that a reader would get as NaN or infinite."""
    return count_not_finite(decode(stored, None)) if scale is None else count_not_finite_fp8(stored, scale)


@dataclass
class CodecReport:
    """What a codec did to a pilot. Relative error of a token = ‖x' − x‖ / ‖x‖; KL(original ‖ stored) in nats."""

    codec: str
    num_tokens: int = 0
    num_supervised: int = 0
    layers: list[str] = field(default_factory=list)
    mean_relative_error: list[float] = field(default_factory=list)  # per layer, then the final state
    worst_relative_error: list[float] = field(default_factory=list)
    token_errors: list[np.ndarray] = field(default_factory=list, repr=False)
    mean_kl: float = 0.0
    worst_kl: float = 0.0
    argmax_agreement: float = 1.0

    def rows(self) -> list[dict]:
        """One row per layer, ready for a table."""
        columns = zip(self.layers, self.mean_relative_error, self.worst_relative_error, strict=True)
        return [{"state": name, "mean_relative_error": mean, "worst_token": worst} for name, mean, worst in columns]

    def require(self, max_kl: float, min_agreement: float) -> None:
        """Raise `UserError` when the stored teacher differs too much from the original, or nothing was compared."""
        if not self.num_supervised:
            raise UserError(
                f"codec {self.codec}: no row of the pilot is supervised, so it cannot be judged",
                "codec judged on the pilot",
                "raise num_pilot_samples, or see what stage 01 supervises",
            )
        if not (self.mean_kl <= max_kl and self.argmax_agreement >= min_agreement):  # NaN does not pass
            raise UserError(
                f"codec {self.codec}: mean KL {self.mean_kl:.4g} (at most {max_kl}), "
                f"arg-max agreement {self.argmax_agreement:.4f} (at least {min_agreement})",
                "codec judged on the pilot",
                "use codec: bf16, or change max_codec_kl / min_codec_agreement",
            )

    def summary(self) -> dict:
        """Everything but the per-token errors, for metrics.json."""
        return {key: value for key, value in asdict(self).items() if key != "token_errors"}


def measure_codec(
    samples,
    codec: str,
    aux_layers: list[int],
    teacher_logits: Callable[[torch.Tensor], torch.Tensor],
    max_rows_per_sample: int = 32,
) -> CodecReport:
    """Judge a codec on a pilot stored in bf16, before the disk is committed.

    Parameters
    ----------
    samples : iterable of `Sample` with aux [T, L, H] and final [M, H] in bf16.
    teacher_logits : maps final states [M, H] to logits [M, V] (the target's head, scale and soft-cap).
    max_rows_per_sample : teacher distributions compared per sample, evenly spaced over its supervised rows.
    """
    errors: list[list[np.ndarray]] = [[] for _ in range(len(aux_layers) + 1)]
    divergences, agreements = [], []
    report = CodecReport(codec, layers=[f"layer {layer}" for layer in aux_layers] + ["final"])
    for sample in samples:
        report.num_tokens += len(sample.input_ids)
        stored_TLH = round_trip(sample.aux, codec)
        for index in range(len(aux_layers)):
            errors[index].append(_relative_error(sample.aux[:, index], stored_TLH[:, index]))
        final_MH = sample.final[torch.from_numpy(supervised_rows(sample.loss_mask)[sample.final_rows])]
        if len(final_MH) == 0:
            continue
        stored_MH = round_trip(final_MH, codec)
        errors[-1].append(_relative_error(final_MH, stored_MH))
        step = -(-len(final_MH) // max_rows_per_sample)
        divergence, agreement = _teachers_compared(final_MH[::step], stored_MH[::step], teacher_logits)
        divergences.append(divergence)
        agreements.append(agreement)
    report.token_errors = [np.concatenate(parts) if parts else np.zeros(0, np.float32) for parts in errors]
    report.mean_relative_error = [float(part.mean()) if part.size else 0.0 for part in report.token_errors]
    report.worst_relative_error = [float(part.max()) if part.size else 0.0 for part in report.token_errors]
    if divergences:
        kl, agree = torch.cat(divergences), torch.cat(agreements)
        report.num_supervised = len(kl)
        report.mean_kl, report.worst_kl, report.argmax_agreement = (
            kl.mean().item(),
            kl.max().item(),
            agree.mean().item(),
        )
    return report


def _teachers_compared(original_MH, stored_MH, teacher_logits) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(original ‖ stored) and whether the arg-max agrees, float32 [M] each; equal states are not computed on."""
    if torch.equal(original_MH, stored_MH):
        return torch.zeros(len(original_MH)), torch.ones(len(original_MH))
    original, stored = (teacher_logits(states).float().log_softmax(-1) for states in (original_MH, stored_MH))
    return (original.exp() * (original - stored)).sum(-1), (original.argmax(-1) == stored.argmax(-1)).float()


def _relative_error(original: torch.Tensor, restored: torch.Tensor) -> np.ndarray:
    if torch.equal(original, restored):
        return np.zeros(len(original), np.float32)
    original, restored = original.float(), restored.float()
    size = original.norm(dim=-1).clamp_min(1e-30)
    return ((restored - original).norm(dim=-1) / size).numpy()
