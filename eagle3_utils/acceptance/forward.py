"""The PyTorch target over many known texts at once: its logits, and its states as samples for the draft.

    for index, logits_NV in logits_of(model, sequences, counts): …
    batches = packed_samples(model, prompts, outputs, aux_layers)

Texts of about equal length share a forward, padded on the right: in a causal model nothing real sees the padding.

Legend: B texts of a forward, T its longest, N wanted positions, L auxiliary layers, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from eagle3_utils.acceptance.prompt_sets import Prompt
from eagle3_utils.states.dataset import PackedBatch

_TOKENS_AT_ONCE = 4096  # of a forward, padding counted: 0.8 GB of float32 logits for a vocabulary of 50,000


@torch.inference_mode()
def logits_of(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], counts: Sequence[int]
) -> Iterator[tuple[int, torch.Tensor]]:
    """(index, float32 logits [N, V] of the last ``counts[index]`` tokens) of every sequence, the shortest first.

    Take what you need of each before the next: they are views of all logits of a forward.
    """
    for chosen in _alike(sequences):
        longest = max(len(sequences[index]) for index in chosen)
        first = min(len(sequences[index]) - counts[index] for index in chosen)  # logits from this position on
        logits_BNV = model(_padded(model, sequences, chosen), logits_to_keep=longest - first).logits
        for row, index in enumerate(chosen):
            end = len(sequences[index]) - first
            yield index, logits_BNV[row, end - counts[index] : end].float()


@torch.no_grad()
def packed_samples(
    model: PreTrainedModel, prompts: Sequence[Prompt], outputs: Sequence[Sequence[int]], aux_layers: Sequence[int]
) -> list[PackedBatch]:
    """Each prompt with its output as a one-sample batch on the CPU, with this model's states; the output supervised."""
    sequences = [[*prompt.input_ids, *output_ids] for prompt, output_ids in zip(prompts, outputs, strict=True)]
    found: list[PackedBatch | None] = [None] * len(sequences)
    for chosen in _alike(sequences):
        states = model(_padded(model, sequences, chosen), output_hidden_states=True, logits_to_keep=1).hidden_states
        aux_BTLH = torch.stack([states[layer + 1] for layer in aux_layers], dim=2).cpu()
        final_BTH = states[-1].cpu()  # transformers' last entry is post-norm
        for row, index in enumerate(chosen):
            ids, prompt = sequences[index], prompts[index]
            found[index] = _sample(ids, prompt, aux_BTLH[row, : len(ids)], final_BTH[row, : len(ids)])
    return found


def _sample(ids: list[int], prompt: Prompt, aux_TLH: torch.Tensor, final_TH: torch.Tensor) -> PackedBatch:
    num_tokens, num_prompt = len(ids), len(prompt.input_ids)
    final_index = torch.full((num_tokens,), -1)
    final_index[num_prompt - 1 : num_tokens - 1] = torch.arange(num_tokens - num_prompt)
    return PackedBatch(
        input_ids=torch.tensor(ids),
        loss_mask=torch.arange(num_tokens) >= num_prompt,
        position_ids=torch.arange(num_tokens),
        document_ids=torch.zeros(num_tokens, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32),
        aux=aux_TLH,
        final=final_TH[num_prompt - 1 : num_tokens - 1],
        final_index=final_index,
        sample_ids=[prompt.id],
        sources=[prompt.source],
    )


def _alike(sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Indices of sequences of about equal length, together at most `_TOKENS_AT_ONCE` with their padding."""
    chosen: list[int] = []
    for index in sorted(range(len(sequences)), key=lambda index: len(sequences[index])):
        if chosen and (len(chosen) + 1) * len(sequences[index]) > _TOKENS_AT_ONCE:
            yield chosen
            chosen = []
        chosen.append(index)
    if chosen:
        yield chosen


def _padded(model: PreTrainedModel, sequences: Sequence[Sequence[int]], chosen: list[int]) -> torch.Tensor:
    longest = max(len(sequences[index]) for index in chosen)
    rows = [[*sequences[index], *[0] * (longest - len(sequences[index]))] for index in chosen]
    return torch.tensor(rows, device=model.device)
