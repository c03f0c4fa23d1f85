"""Is the served number the offline number? The same tokens through the PyTorch draft and through SGLang.

    report = compare(offline_accepted, served_accepted, num_steps=3, tolerance=0.02)
    report = diagnose(report, draft, target, batches_of, shape, served_accepted)

The tokens that SGLang gave are replayed through the trained draft (`heldout.replay`), which begins its verifications
where SGLang began its own; so acceptance by position must agree up to rounding. Two figures are compared:

- the share of all verifications that accept at least 1, 2, … draft tokens: `distance` is the largest difference;
- the same prompt by prompt: `mismatch` is the share of verifications that one side counts under another number of
  accepted tokens. Sums over prompts hide a wrong layer when the draft is weak; which prompt accepts what does not.

Then one fault after the other is put into the trained draft. A fault whose figures are the served ones, and fit the
prompts better than the trained draft itself does, is a cause; parity passes within the tolerance and without a cause.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from eagle3_utils.acceptance.heldout import replay_all
from eagle3_utils.acceptance.tree import TreeShape
from eagle3_utils.draft.modules.rope import RotaryEmbedding
from eagle3_utils.draft.network import DraftModel
from eagle3_utils.states.dataset import PackedBatch
from eagle3_utils.target import Target

BatchesOf = Callable[[Sequence[int]], list[PackedBatch]]  # auxiliary layers → the samples with their states
_BETTER = 0.7  # a fault must leave this share of the trained draft's own mismatch, or less, to be a cause
_ALIKE = 0.9  # faults that take away this share of what the best one takes away fit as well
_USUAL_THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0)  # Llama 2, SmolLM2, Llama 3, Qwen


@dataclass(frozen=True)
class Trial:
    """One fault put into the trained draft, and how far its figures then are from the served ones."""

    fault: str
    shares: list[float]
    distance: float  # largest difference at any position
    mismatch: float  # share of verifications counted otherwise, prompt by prompt


@dataclass(frozen=True)
class ParityReport:
    """Shares of verifications that accept at least 1, 2, … draft tokens, offline and served."""

    offline: list[float] = field(default_factory=list)
    served: list[float] = field(default_factory=list)
    num_verifications: int = 0
    tolerance: float = 0.02
    mismatch: float = 0.0  # share of verifications counted otherwise, prompt by prompt
    trials: list[Trial] = field(default_factory=list)
    left_out: str | None = None  # why nothing was compared

    @property
    def distance(self) -> float:
        """Largest difference at any position."""
        return _distance(self.offline, self.served)

    @property
    def passed(self) -> bool | None:
        """None when nothing was compared."""
        return None if self.left_out else self.distance <= self.tolerance and not self.causes

    @property
    def causes(self) -> list[str]:
        """Faults with the served figures that fit the prompts better than the trained draft does; the best first.

        Those that fit as well as the best one (nothing accepted looks alike whatever the reason) are all named.
        """
        within = [trial for trial in self.trials if trial.distance <= self.tolerance]
        best = min((trial.mismatch for trial in within), default=1.0)
        if best >= _BETTER * self.mismatch:
            return []
        alike = [trial for trial in within if self.mismatch - trial.mismatch >= _ALIKE * (self.mismatch - best)]
        return [trial.fault for trial in sorted(alike, key=lambda trial: trial.mismatch)]

    def text(self) -> str:
        """The verdict in a few lines."""
        if self.left_out:
            return f"parity: left out ({self.left_out})"
        lines = [
            f"parity {'PASSED' if self.passed else 'FAILED'}: largest difference {self.distance:.3f}, "
            f"tolerance {self.tolerance}, {self.num_verifications:,} verifications",
            "  position  offline  served",
            *(f"  {n:8}  {a:7.3f}  {b:6.3f}" for n, (a, b) in enumerate(zip(self.offline, self.served, strict=True))),
            f"  length    {1 + sum(self.offline):7.3f}  {1 + sum(self.served):6.3f}",
            f"  {self.mismatch:.1%} of the verifications are counted otherwise, prompt by prompt",
        ]
        if not self.passed:
            lines.append(f"  explained by: {'; or '.join(self.causes) or 'none of the faults tried'}")
        if self.trials:
            lines.append("  faults tried: difference, counted otherwise")
            nearest = sorted(self.trials, key=lambda trial: trial.mismatch)
            lines += [f"    {trial.distance:.3f}  {trial.mismatch:6.1%}  {trial.fault}" for trial in nearest]
        return "\n".join(lines)


def accepted_shares(num_accepted: Sequence[Sequence[int]], num_steps: int) -> list[float]:
    """Share of all verifications that accept at least 1, 2, … draft tokens; 1 + their sum is the accept length."""
    flat = np.array([accepted for of_prompt in num_accepted for accepted in of_prompt])
    return [float((flat >= depth).mean()) if len(flat) else 0.0 for depth in range(1, num_steps + 1)]


def accepted_mismatch(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]], num_steps: int) -> float:
    """Share of verifications that both sides do not count alike, prompt by prompt; 0 when all histograms are equal."""
    counts_2PN = np.array(
        [[np.bincount(accepted, minlength=num_steps + 1) for accepted in side] for side in (first, second)]
    )
    return float(np.abs(counts_2PN[0] - counts_2PN[1]).sum() / max(1, counts_2PN.sum()))


def compare(
    offline_accepted: Sequence[Sequence[int]],
    served_accepted: Sequence[Sequence[int]],
    num_steps: int,
    tolerance: float = 0.02,
) -> ParityReport:
    """Put both side by side; each is, per prompt, the draft tokens accepted by every verification."""
    return ParityReport(
        offline=accepted_shares(offline_accepted, num_steps),
        served=accepted_shares(served_accepted, num_steps),
        num_verifications=sum(map(len, served_accepted)),
        tolerance=tolerance,
        mismatch=accepted_mismatch(offline_accepted, served_accepted, num_steps),
    )


def diagnose(
    report: ParityReport,
    draft: DraftModel,
    target: Target,
    batches_of: BatchesOf,
    shape: TreeShape,
    served_accepted: Sequence[Sequence[int]],
) -> ParityReport:
    """The report with every fault tried on the trained draft over the same tokens."""
    trials = []
    for fault, broken in faults(draft, target):
        accepted = replay_all(broken, batches_of(broken.config.aux_layers), shape)
        shares = accepted_shares(accepted, shape.num_steps)
        mismatch = accepted_mismatch(accepted, served_accepted, shape.num_steps)
        trials.append(Trial(fault, shares, _distance(shares, report.served), mismatch))
    return replace(report, trials=trials)


def faults(draft: DraftModel, target: Target) -> Iterator[tuple[str, DraftModel]]:
    """What is known to go wrong between training and serving: its name, and the trained draft with that fault.

    A name says what the served draft seems to suffer from. Faults that would change nothing are left out. Each draft
    is made when it is asked for: a large one has room for one copy, not for twenty.
    """
    layers, config = draft.config.aux_layers, draft.config
    for shift in (-1, 1):
        moved = tuple(layer + shift for layer in layers)
        if min(moved) >= 0 and max(moved) < target.num_layers - 1:
            name = f"layer ids are {abs(shift)} too {'low' if shift < 0 else 'high'}: captured {list(moved)}"
            yield name, _with_config(draft, aux_layers=moved)
    default = (1, target.num_layers // 2 - 1, target.num_layers - 4)
    if default != layers and len(layers) == 3:
        name = f"eagle_config is missing: SGLang's default layers {list(default)}"
        yield name, _with_config(draft, aux_layers=default)
    yield "layer order: the states are concatenated in reverse", _with_config(draft, aux_layers=layers[::-1])
    if bool(draft.d2t.any()):
        yield "d2t holds absolute ids instead of offsets", _edit(draft, _absolute_d2t)
        yield "d2t is missing: draft ids are taken for target ids", _edit(draft, lambda broken: broken.d2t.zero_())
    yield "lm_head is missing: it keeps its initial value", _edit(draft, _forget_lm_head)
    yield "embeddings are not the target's", _edit(draft, _forget_embeddings)
    for theta in _USUAL_THETAS:
        if config.rope.get("rope_type", "default") != "default" or config.rope["rope_theta"] != theta:
            name = f"RoPE is plain with theta {theta:,.0f} instead of the trained one"
            yield name, _with_rope(draft, {"rope_type": "default", "rope_theta": theta})
    yield "the final norm's weight is missing: it is 1", _edit(draft, lambda broken: broken.norm.weight.fill_(1))
    yield "the norms of embedding and hidden state are exchanged", _edit(draft, _exchange_norms)
    if config.fc_norm:
        yield "fc_norm is left out", _with_config(draft, fc_norm=False)
    swapped = "before" if config.norm_output else "after"
    name = f"the next step takes the state {swapped} the final norm"
    yield name, _with_config(draft, norm_output=not config.norm_output)


def _with_config(draft: DraftModel, **changes) -> DraftModel:
    """The same weights under another config."""
    broken = copy.copy(draft)
    broken.config = replace(draft.config, **changes)
    return broken


def _edit(draft: DraftModel, change: Callable[[DraftModel], object]) -> DraftModel:
    """A copy with changed weights."""
    broken = copy.deepcopy(draft)
    with torch.no_grad():
        change(broken)
    return broken


def _with_rope(draft: DraftModel, rope: dict) -> DraftModel:
    rotary = RotaryEmbedding(rope, draft.midlayer.self_attn.rotary_dim, draft.config.max_position_embeddings)
    return _edit(draft, lambda broken: setattr(broken, "rotary", rotary))


def _absolute_d2t(broken: DraftModel) -> None:
    draft_ids = broken.target_ids - broken.d2t
    broken.d2t.copy_((broken.target_ids + draft_ids).clamp(max=len(broken.t2d) - 1) - draft_ids)


def _forget_lm_head(broken: DraftModel) -> None:
    noise = torch.randn(broken.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
    broken.lm_head.weight.copy_(0.02 * noise)


def _exchange_norms(broken: DraftModel) -> None:
    layer = broken.midlayer
    layer.input_layernorm, layer.hidden_norm = layer.hidden_norm, layer.input_layernorm


def _forget_embeddings(broken: DraftModel) -> None:
    broken.embed_tokens = torch.zeros_like(broken.embed_tokens)


def _distance(first: Sequence[float], second: Sequence[float]) -> float:
    return max((abs(a - b) for a, b in zip(first, second, strict=True)), default=0.0)
