"""Held-out prompts through the reference decoder: is the output plain greedy's, and how much is accepted?

    prompts = read_prompts(paths, tokenizer, per_source=8)
    decoded = decode_prompts(model, draft, prompts, TreeShape(3), max_new_tokens=64, stop_ids=stops)
    accept_lengths(decoded)["all"]       # 1 + Σ accepted / Σ verifications, with a 95 % interval over prompts

`replay` gives the accept lengths of any other tree for the same outputs, without running the target again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from eagle3_utils.acceptance.intervals import (
    ALL,
    NUM_RESAMPLES,
    Interval,
    bootstrap_sums,
    intervals,
    ratio,
    ratio_interval,
)
from eagle3_utils.acceptance.prompt_sets import Prompt
from eagle3_utils.acceptance.speculate import Decoded, DraftState, plain_decode, speculative_decode
from eagle3_utils.acceptance.tree import TreeShape, grow_tree
from eagle3_utils.devices import one_torch_thread
from eagle3_utils.draft.network import DraftCache, DraftModel
from eagle3_utils.states.dataset import PackedBatch

_SLOTS_AT_ONCE = 512  # of a replayed chain: bounds the attention scores of long samples


@dataclass(frozen=True)
class DecodedPrompt:
    """One prompt decoded with the draft, and plainly too when ``plain`` is there."""

    prompt: Prompt
    speculative: Decoded
    plain: Decoded | None = None


def decode_prompts(
    model: PreTrainedModel,
    draft: DraftModel,
    prompts: Sequence[Prompt],
    shape: TreeShape,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    plain_per_source: int = 1,
    progress: Callable[[int], None] | None = None,
) -> list[DecodedPrompt]:
    """Decode prompts greedily with the draft, the first ``plain_per_source`` of each source plainly as well.

    ``progress`` is called with the number of prompts done. `greedy_violations` checks outputs that were not decoded
    plainly, for a fraction of the time.
    """
    seen, wanted = {}, []
    for prompt in prompts:
        seen[prompt.source] = seen.get(prompt.source, 0) + 1
        wanted.append((prompt, seen[prompt.source] <= plain_per_source))

    def decode(item: tuple[Prompt, bool]) -> DecodedPrompt:
        prompt, plainly = item
        layers = draft.config.aux_layers
        speculative = speculative_decode(model, draft, prompt.input_ids, max_new_tokens, shape, layers, stop_ids)
        plain = plain_decode(model, prompt.input_ids, max_new_tokens, stop_ids) if plainly else None
        return DecodedPrompt(prompt, speculative, plain)

    return map_on_cores(decode, wanted, model.device, progress)


def replay_all(
    draft: DraftModel, batches: Sequence[PackedBatch], shape: TreeShape, whole: bool = False
) -> list[list[int]]:
    """`replay` of every sample."""
    return map_on_cores(lambda batch: replay(draft, batch, shape, whole), batches, draft.fc.weight.device)


def map_on_cores(
    function: Callable[[Any], Any],
    items: Sequence[Any],
    device: torch.device,
    progress: Callable[[int], None] | None = None,
) -> list[Any]:
    """``function`` of every item, in order. On a CPU several at a time, each on a thread with one core.

    Decoding multiplies matrices of a few rows, where a second core does nothing but wait: two prompts side by side
    take 0.17 s per verification (SmolLM2-135M, two cores), one after the other on both cores 0.24 to 0.56.
    """
    results, on_cpu = [], device.type == "cpu"
    num_threads = torch.get_num_threads() if on_cpu else 1
    with one_torch_thread() if on_cpu else nullcontext(), ThreadPoolExecutor(num_threads) as pool:
        try:
            for result in pool.map(function, items):
                results.append(result)
                if progress:
                    progress(len(results))
        finally:
            pool.shutdown(cancel_futures=True)
    return results


def accept_lengths(
    decoded: Sequence[DecodedPrompt], num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> dict[str, Interval]:
    """Accept length by source and for "all": 1 (the bonus token) + Σ accepted drafts / Σ verifications.

    What `served.py` calls `counted`: neither the token of the prefill nor where an answer ends makes a difference.
    Prompts without a verification are left out.
    """
    groups: dict[str, list[Decoded]] = {ALL: []}
    for item in decoded:
        if item.speculative.num_verifications:
            groups[ALL].append(item.speculative)
            groups.setdefault(item.prompt.source, []).append(item.speculative)
    return {
        source: accept_length([run.num_accepted for run in group], num_resamples, seed)
        for source, group in groups.items()
        if group
    }


def accept_length(num_accepted: Sequence[Sequence[int]], num_resamples: int = NUM_RESAMPLES, seed: int = 0) -> Interval:
    """1 (the bonus token) + Σ accepted drafts / Σ verifications; ``num_accepted`` as for `acceptance_by_position`."""
    tokens = [len(accepted) + sum(accepted) for accepted in num_accepted]
    return ratio_interval(tokens, list(map(len, num_accepted)), num_resamples, seed)


def acceptance_by_position(
    num_accepted: Sequence[Sequence[int]], num_steps: int, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> list[Interval]:
    """Of the verifications that accepted i draft tokens or more, the share that accepted one more; i = 0, 1, …

    ``num_accepted``: per prompt, the draft tokens accepted by each of its verifications. Intervals are over prompts.
    """
    reached = [[sum(a >= depth for a in accepted) for depth in range(num_steps + 1)] for accepted in num_accepted]
    sums = bootstrap_sums(np.array(reached, dtype=np.float64), num_resamples, seed)
    return intervals(ratio(sums[:, 1:], sums[:, :-1]))


def accepted_histogram(num_accepted: Sequence[Sequence[int]], num_steps: int) -> list[int]:
    """How many verifications of all prompts accepted 0, 1, … ``num_steps`` draft tokens."""
    flat = [accepted for of_prompt in num_accepted for accepted in of_prompt]
    return np.bincount(flat, minlength=num_steps + 1).tolist()


def first_difference(first_ids: Sequence[int], second_ids: Sequence[int]) -> int | None:
    """Index of the first token in which two outputs differ, one being shorter counting as different; None if equal."""
    if list(first_ids) == list(second_ids):
        return None
    pairs = zip(first_ids, second_ids, strict=False)
    shorter = min(len(first_ids), len(second_ids))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)


@torch.inference_mode()
def greedy_violations(
    model: PreTrainedModel, input_ids: Sequence[int], output_ids: Sequence[int]
) -> list[tuple[int, float]]:
    """Output tokens that are not the target's best choice after everything before them: (index, logits below the best).

    None at all means that the output is plain greedy decoding's, by induction over its tokens. One forward without any
    cache, so it shares nothing with the decoders it checks. A violation within the rounding of the logits is numerics.
    """
    known = torch.tensor([[*input_ids, *output_ids[:-1]]], device=model.device)
    logits_NV = model(known, logits_to_keep=len(output_ids)).logits[0].float()
    chosen_N = logits_NV.gather(1, torch.tensor(output_ids, device=model.device)[:, None])[:, 0]
    below_N = (logits_NV.max(dim=-1).values - chosen_N).tolist()
    return [(index, below) for index, below in enumerate(below_N) if below > 0]


@torch.inference_mode()
def replay(draft: DraftModel, batch: PackedBatch, shape: TreeShape, whole: bool = False) -> list[int]:
    """Draft tokens accepted per verification if this one sample were decoded with ``shape``, its output being known.

    The output are the first supervised tokens in a row: of a sample of several turns the first answer. Equal to what
    `speculative_decode` gives for the same greedy output, without the target, but for the last verifications, where
    tokens after the end of the output cannot be counted; ``whole`` leaves out those that look beyond it.
    """
    mask = batch.loss_mask[1:].int()
    if not mask.any():
        return []
    first = 1 + int(mask.argmax())  # the first output token, which prefill gives
    end = first + int(mask[first - 1 :].cumprod(0).sum())
    batch = replace(batch, input_ids=batch.input_ids[:end], aux=batch.aux[:end])
    last = len(batch.input_ids) - (shape.num_steps if whole else 1)  # roots are before it
    if shape.topk > 1:
        return _replay_tree(draft, batch, shape, first, last)
    depths, root, accepted = chain_depths(draft, batch, shape.num_steps, first - 1), first, []
    while root < last:
        accepted.append(depths[root - 1])
        root += depths[root - 1] + 1
    return accepted


def chain_depths(draft: DraftModel, batch: PackedBatch, num_steps: int, first_slot: int = 0) -> list[int]:
    """For every slot t of a sample, how many of the tokens t + 2, t + 3, … a chain drafted from there has right.

    Many slots draft at once: at a step each row sees the real slots up to its own and what it drafted itself. Slots
    before ``first_slot`` are 0.
    """
    device = draft.fc.weight.device
    ids_T, aux_TLH = batch.input_ids.to(device), batch.aux.to(draft.fc.weight)
    num_slots, cache, depths = len(ids_T) - 1, DraftCache(), []
    positions_N = torch.arange(num_slots, device=device)
    hidden_NH, logits_ND = draft.decode_step(draft.project(aux_TLH[:-1]), ids_T[1:], positions_N, cache)
    drafted_N = draft.target_ids[logits_ND.argmax(-1)]
    for start in range(first_slot, num_slots, _SLOTS_AT_ONCE):
        positions_R = positions_N[start : start + _SLOTS_AT_ONCE]
        hidden_RH, drafted_R = hidden_NH[positions_R], drafted_N[positions_R]
        mask_RM = positions_N[None, :] <= positions_R[:, None]
        own_RR = torch.eye(len(positions_R), dtype=torch.bool, device=device)
        right_R, depths_R = torch.ones_like(positions_R, dtype=torch.bool), torch.zeros_like(positions_R)
        cache.truncate(num_slots)
        for step in range(1, num_steps + 1):
            truth_R = positions_R + 1 + step
            right_R &= (truth_R < len(ids_T)) & (drafted_R == ids_T[truth_R.clamp(max=len(ids_T) - 1)])
            depths_R += right_R
            if step < num_steps:
                mask_RM = torch.cat([mask_RM, own_RR], dim=1)
                hidden_RH, logits_RD = draft.decode_step(hidden_RH, drafted_R, positions_R + step, cache, mask_RM)
                drafted_R = draft.target_ids[logits_RD.argmax(-1)]
        depths += depths_R.tolist()
    return [0] * first_slot + depths


def _replay_tree(draft: DraftModel, batch: PackedBatch, shape: TreeShape, root: int, last: int) -> list[int]:
    """`replay` verification by verification, for trees."""
    token_ids = batch.input_ids.tolist()
    drafter, accepted, aux_TLH = DraftState(draft), [], batch.aux.to(draft.fc.weight.device)
    hidden_H, logits_D = drafter.extend(aux_TLH[:root], token_ids[1 : root + 1])
    while root < last:
        tree = grow_tree(token_ids[root], hidden_H, logits_D, draft.target_ids, drafter.step, shape)
        node, depth = 0, 0
        while root + depth + 1 < len(token_ids):
            below = [
                child for child in tree.children(node) if int(tree.token_ids[child]) == token_ids[root + depth + 1]
            ]
            if not below:
                break
            node, depth = below[0], depth + 1
        accepted.append(depth)
        next_ids = token_ids[root + 1 : root + depth + 2]
        hidden_H, logits_D = drafter.extend(aux_TLH[root : root + len(next_ids)], next_ids)
        root += depth + 1
    return accepted
