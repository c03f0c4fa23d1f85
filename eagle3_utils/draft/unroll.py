"""Training-time test: the draft is trained as it is served, on its own hidden states, for S steps.

    step 0   slot t takes h = fc(aux[t]) and token t+1; it predicts token t+2
    step i   slot t takes its own h of step i-1 and token t+1+i at position t+i; it predicts token t+2+i

The target's distribution at t+1+i is the teacher. A prediction counts when the loss mask of the *predicted* token
is 1. The loss of step i is the sum over supervised positions divided by their number; positions whose teacher's
argmax has no draft id add nothing to that sum. The batch's loss is Σ weight_i · loss_i.
Source: EAGLE-3 (arXiv 2503.01840), section 3.2; plan.py says which slots are computed and why the rest is not.

T tokens · N rows · S steps · H hidden · A, K heads · E, F head widths · D draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eagle3_utils.devices import to_device
from eagle3_utils.draft.metrics import StepCounts, chain_counts
from eagle3_utils.draft.modules.fused import Columns, halves, linear, normed_linears, rows_of
from eagle3_utils.draft.network import DraftModel
from eagle3_utils.draft.unrolling.attention import Attention, eager_attention
from eagle3_utils.draft.unrolling.loss import LossJob, UnrollOptions, chunked_loss
from eagle3_utils.draft.unrolling.plan import UnrollPlan
from eagle3_utils.draft.unrolling.teacher import Teacher


@dataclass
class UnrollResult:
    """loss: scalar with a gradient. counts: sums by step. slots int64 [N], supervised and correct bool [N, S]: the
    same by slot. covered bool [M]: which teacher rows have their argmax in the draft vocabulary."""

    loss: torch.Tensor
    counts: StepCounts
    slots: torch.Tensor
    supervised: torch.Tensor
    correct: torch.Tensor
    covered: torch.Tensor


@dataclass
class PrefixStates:
    """What all slots have in common, by slot: fused [T, H]; step-0 keys [T, K, E] and values [T, K, F];
    the embedding's share of the first maps, embed_query and embed_kv [T, latent] (of the token *at* the slot)."""

    fused: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    embed_query: torch.Tensor
    embed_kv: torch.Tensor


def prefix_states(model: DraftModel, batch) -> PrefixStates:
    """Fuse the target's states and make the step-0 keys and values of every slot."""
    layer, attention = model.midlayer, model.midlayer.self_attn
    fused = model.project(batch.aux)  # [T, H]
    # Both first maps read concat(embedding, hidden). Their embedding half is computed once per token for all steps.
    (query_by_embed, *kv_by_embed), (_, *kv_by_hidden) = _halves_of_first_maps(attention)
    embeds = layer.input_layernorm(model.embed(batch.input_ids, getattr(batch, "embeds", None)))  # [T, H]
    embed_query = linear(embeds, query_by_embed)
    embed_kv = torch.cat([linear(embeds, weight) for weight in kv_by_embed], dim=-1)
    norm = layer.hidden_norm
    kv_of_fused = torch.cat(normed_linears(fused, norm.weight, norm.eps, *kv_by_hidden), dim=-1)
    cos, sin = model.rotary(batch.position_ids)
    next_kv = torch.cat([embed_kv[1:], embed_kv[-1:]])  # slot t takes token t+1; a document's last slot is never seen
    keys, values = attention.keys_values(next_kv + kv_of_fused, cos, sin)
    return PrefixStates(fused, keys, values, embed_query, embed_kv)


def _halves_of_first_maps(attention) -> tuple[tuple[Columns, ...], tuple[Columns, ...]]:
    """The embedding's and the hidden state's half of the first maps: queries first, then keys and values."""
    return tuple(zip(*map(halves, (attention.query_weight(), *attention.key_value_weights())), strict=True))


def unrolled_hidden(
    model: DraftModel, batch, plan: UnrollPlan, attend: Attention, prefix: PrefixStates | None = None
) -> list[torch.Tensor]:
    """Hidden states after the final norm, by step: [n_0, H], [n_1, H], …"""
    layer, attention, norm, rows = model.midlayer, model.midlayer.self_attn, model.midlayer.hidden_norm, plan.rows
    prefix = prefix or prefix_states(model, batch)
    _, by_hidden = _halves_of_first_maps(attention)
    hidden = rows_of(prefix.fused, rows)
    own_keys, own_values, outputs = [], [], []
    for step, count in enumerate(plan.num_rows):
        if count == 0:
            break
        tokens = rows[:count] + 1 + step
        cos, sin = model.rotary(batch.position_ids[rows[:count]] + step)
        if step:
            hidden = model.next_input(hidden, outputs[-1])[:count]
            of_hidden, *kv_of_hidden = normed_linears(hidden, norm.weight, norm.eps, *by_hidden)
            latent = rows_of(prefix.embed_kv, tokens) + torch.cat(kv_of_hidden, dim=-1)
            key, value = attention.keys_values(latent, cos, sin)
            own_keys, own_values = [k[:count] for k in own_keys] + [key], [v[:count] for v in own_values] + [value]
        else:
            (of_hidden,) = normed_linears(hidden, norm.weight, norm.eps, by_hidden[0])
        query = attention.queries(rows_of(prefix.embed_query, tokens) + of_hidden, cos, sin)
        attended = attend(query, prefix.keys, prefix.values, own_keys, own_values, attention.scale)
        hidden = layer.finish(hidden, attended)
        outputs.append(model.norm(hidden))
    return outputs


def training_time_test(
    model: DraftModel,
    batch,
    plan: UnrollPlan,
    teacher: Teacher,
    options: UnrollOptions,
    num_supervised: torch.Tensor | None = None,
    covered: torch.Tensor | None = None,
    attend: Attention | None = None,
    prefix: PrefixStates | None = None,
) -> UnrollResult:
    """Unroll one packed batch and take its loss.

    batch: a `PackedBatch` (input_ids, position_ids, aux [T, L, H], final [M, H]) on the model's device. plan: its
    `plan_unroll`, moved there. num_supervised float64 [S]: positions to divide by, when the optimiser step has more
    batches than this one (accumulation, ranks); default: this batch's own. covered bool [M]: from an earlier visit.
    attend: default the eager one. prefix: `prefix_states` of the batch, when they are at hand.
    """
    attend = attend or eager_attention(plan)
    outputs = unrolled_hidden(model, batch, plan, attend, prefix)
    divisor = (plan.num_supervised if num_supervised is None else num_supervised).clamp(min=1)
    scale = torch.tensor(options.step_weights, dtype=torch.float64) / divisor.cpu()
    spare = model.fc.weight.new_zeros(1, model.config.hidden_size)  # for places of `pair_index` without a pair
    hidden = torch.cat([*outputs, spare])
    del outputs
    job = LossJob(
        teacher=teacher,
        final=batch.final[plan.teacher_rows],
        pair_index=plan.pair_index,
        step_scale=to_device(scale.float(), hidden.device),
        covered=None if covered is None else covered[plan.teacher_rows],
        options=options,
    )
    loss, details = chunked_loss(hidden, model.lm_head.weight, job)
    del hidden  # as large as all steps' states, and done with
    if plan.num_hidden == 0:  # every weight has a gradient all the same: sharded ranks must sum the same ones
        loss = loss + 0.0 * sum(parameter.sum() for parameter in model.parameters() if parameter.requires_grad)
    has_pair = plan.pair_index < plan.num_hidden
    supervised, correct = plan.by_slot(has_pair), plan.by_slot(details.correct)
    alive, accepted = chain_counts(correct, supervised)
    counts = StepCounts(
        supervised=has_pair.sum(0),
        correct=details.correct.sum(0),
        out_of_vocab=(has_pair & ~details.covered[:, None]).sum(0),
        baseline=(has_pair & details.baseline_hit[:, None]).sum(0),
        loss=details.loss.double().sum(0),
        overlap=details.overlap.double().sum(0),
        alive=alive,
        accepted=accepted,
    )
    return UnrollResult(loss, counts, plan.rows, supervised, correct, details.covered)
