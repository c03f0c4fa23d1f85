"""Teacher-forced acceptance: what a draft would be accepted, from stored hidden states, without decoding.

    teacher = Teacher(load_lm_head(target).float(), draft.target_ids, target)
    samples = count_samples(draft, teacher, one_by_one(reader, 200), num_steps=7)
    summarise(samples)["chat"]["accept_length"]      # Interval(value=2.31, low=2.19, high=2.44)

Counts are kept per sample (one prompt, one answer), because tokens of one answer are not independent: the 95 %
intervals come from drawing whole samples anew with replacement (bootstrap). Figures are defined in draft/metrics.py.

Legend: S samples, R resamples, C counted quantities, I steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eagle3_utils.acceptance.intervals import ALL, NUM_RESAMPLES, bootstrap_sums, intervals, ratio
from eagle3_utils.corpus.records import Record
from eagle3_utils.draft import metrics
from eagle3_utils.draft.network import DraftModel
from eagle3_utils.draft.unroll import UnrollOptions, training_time_test
from eagle3_utils.draft.unrolling.attention import eager_attention
from eagle3_utils.draft.unrolling.plan import plan_unroll
from eagle3_utils.draft.unrolling.teacher import Teacher
from eagle3_utils.draft.vocab import count_tokens
from eagle3_utils.states.dataset import PackedBatch, PackedDataset
from eagle3_utils.states.reader import StoreReader


@dataclass(frozen=True)
class SampleCounts:
    """One sample's sums by step."""

    id: str
    source: str
    counts: metrics.StepCounts


def one_by_one(reader: StoreReader, max_samples: int, seed: int = 0) -> Iterator[PackedBatch]:
    """At most ``max_samples`` samples of a store, chosen by ``seed``, each as a batch of its own."""
    dataset = PackedDataset(reader, max_tokens=int(reader.lengths.max()))
    chosen = np.random.default_rng(seed).permutation(len(reader))[:max_samples]
    return (dataset.load([int(index)]) for index in np.sort(chosen))


def most_frequent_draft_id(draft: DraftModel, records: Iterable[Record]) -> int:
    """Draft id of the token the records supervise most often, the draft to beat; −1 when it has none."""
    counts, _ = count_tokens(((record.input_ids, record.loss_mask) for record in records), draft.config.vocab_size)
    return draft.draft_id_of(int(counts.argmax()))


def count_samples(
    draft: DraftModel,
    teacher: Teacher,
    batches: Iterable[PackedBatch],
    num_steps: int,
    baseline_id: int = -1,
    progress: Callable[[int], None] | None = None,
) -> list[SampleCounts]:
    """Unroll the draft over batches of **one sample each** and keep its counts.

    Parameters
    ----------
    batches : with one document each, from `one_by_one` or `forward.packed_samples`.
    baseline_id : draft id of the training corpus's most frequent token; −1 leaves the baseline at 0.
    progress : called with the number of samples done.
    """
    device = draft.fc.weight.device
    options = UnrollOptions((1.0,) * num_steps, want_overlap=True, baseline_id=baseline_id)
    samples = []
    for batch in batches:
        assert len(batch.sample_ids) == 1, "one sample per batch: intervals are over samples"
        plan = plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, num_steps).to(device)
        work = draft, batch.to(device), plan, teacher, options
        # nothing compiled: on a GPU that takes longer than some hundred samples do without
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            counts = training_time_test(*work, attend=eager_attention(plan)).counts
        counts = metrics.StepCounts.from_tensor(counts.as_tensor().cpu())
        samples.append(SampleCounts(batch.sample_ids[0], batch.sources[0], counts))
        if progress:
            progress(len(samples))
    return samples


def summarise(
    samples: Sequence[SampleCounts], num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Figures with intervals, by source and for "all": source → {figure: Interval, or a list of them by step}.

    Figures: accuracy, conditional, overlap, out_of_vocab, baseline (by step), accept_length (of a chain of 1, 2, …
    steps, by number of steps), and the plain counts ``num_samples`` and ``supervised``. Empty without samples.
    """
    groups = {ALL: list(samples)}
    for sample in samples:
        groups.setdefault(sample.source, []).append(sample)
    return {source: _figures(group, num_resamples, seed) for source, group in groups.items() if group}


def _figures(samples: list[SampleCounts], num_resamples: int, seed: int) -> dict[str, Any]:
    stacked_SCI = np.stack([sample.counts.as_tensor().numpy() for sample in samples])
    num_samples, num_counts, num_steps = stacked_SCI.shape
    sums_RCI = bootstrap_sums(stacked_SCI.reshape(num_samples, -1), num_resamples, seed)
    sums = metrics.StepCounts(*sums_RCI.reshape(-1, num_counts, num_steps).transpose(1, 0, 2))
    conditional_RI = ratio(sums.accepted, sums.alive)
    return {
        "num_samples": num_samples,
        "supervised": [int(count) for count in sums.supervised[0]],
        "accuracy": intervals(ratio(sums.correct, sums.supervised)),
        "conditional": intervals(conditional_RI),
        "accept_length": intervals(1 + np.cumprod(conditional_RI, axis=1).cumsum(axis=1)),  # metrics.accept_length
        "overlap": intervals(ratio(sums.overlap, sums.supervised)),
        "out_of_vocab": intervals(ratio(sums.out_of_vocab, sums.supervised)),
        "baseline": intervals(ratio(sums.baseline, sums.supervised)),
    }
