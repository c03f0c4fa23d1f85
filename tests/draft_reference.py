"""An independent EAGLE-3 training-time test, written in the plainest way: full rows, explicit masks, one loop a step.

`naive_training_time_test` shares no code with eagle3_utils.draft; it reads a draft's weights by SGLang's names.
"""

import math
from types import SimpleNamespace

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3_utils.draft.network import DraftConfig, DraftModel
from eagle3_utils.draft.unroll import UnrollOptions, training_time_test
from eagle3_utils.draft.unrolling.plan import plan_unroll
from eagle3_utils.draft.unrolling.teacher import Teacher
from eagle3_utils.draft.vocab import vocab_map_of

VOCAB, DRAFT_VOCAB, HIDDEN = 31, 12, 32
MLA = dict(layer_kind="mla", num_kv_heads=4, q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4,
           v_head_dim=6)  # fmt: skip
PLAIN_LOGITS = SimpleNamespace(logit_scale=1.0, logit_softcap=None)  # a target that does nothing to its logits


def small_config(**changes) -> DraftConfig:
    """A draft small enough for float64-like checks; grouped-query attention with two groups."""
    shape = dict(hidden_size=HIDDEN, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=VOCAB,
                 draft_vocab_size=DRAFT_VOCAB, aux_layers=(1, 2, 4), max_position_embeddings=256)  # fmt: skip
    return DraftConfig(**(shape | changes))


def small_model(seed: int = 0, **changes) -> tuple[DraftModel, torch.Tensor]:
    """A random draft and a random target head [V, H]; weights large enough for lively attention."""
    config = small_config(**changes)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCAB, generator=generator)[: config.draft_vocab_size].sort().values
    embed = torch.randn(VOCAB, HIDDEN, generator=generator)
    model = DraftModel(config, vocab_map_of(ids, VOCAB), embed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5)
    head = torch.randn(VOCAB, HIDDEN, generator=generator) / 2
    head[~model.t2d] *= 0.5  # as with a vocabulary by frequency: most of the teacher's choices have a draft id
    return model, head


def random_batch(lengths, masks=None, seed: int = 1, num_layers: int = 3) -> SimpleNamespace:
    """Random packed documents; masks: 0/1 strings per document, else random with turns."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    if masks is None:
        mask = torch.rand(total, generator=generator) < 0.55
    else:
        mask = torch.tensor([int(bit) for document in masks for bit in document]).bool()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    document_ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    needed = torch.zeros(total, dtype=torch.bool)
    needed[:-1] = mask[1:] & (document_ids[1:] == document_ids[:-1])
    final_index = torch.where(needed, needed.cumsum(0) - 1, -1)
    return SimpleNamespace(
        input_ids=torch.randint(0, VOCAB, (total,), generator=generator),
        loss_mask=mask,
        position_ids=position_ids,
        document_ids=document_ids,
        cu_seqlens=cu_seqlens,
        aux=torch.randn(total, num_layers, HIDDEN, generator=generator),
        final=torch.randn(int(needed.sum()), HIDDEN, generator=generator),
        final_index=final_index,
        sample_ids=[f"s{i}" for i in range(len(lengths))],
        sources=["test"] * len(lengths),
        num_tokens=total,
    )


def naive_norm(x, weight, config):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps) * weight


def naive_rope(x, positions, config):
    """x [T, heads, width] rotated as transformers does it; MLA's pairs are neighbours, Llama's half a width apart."""
    width = x.shape[-1]
    limit, rope = config.max_position_embeddings, dict(config.rope)
    tables = LlamaRotaryEmbedding(LlamaConfig(head_dim=width, max_position_embeddings=limit, rope_parameters=rope))
    cos, sin = (table[0, :, None, : width // 2] for table in tables(torch.zeros(1), positions[None]))
    if config.layer_kind == "mla":
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    a, b = x[..., : width // 2], x[..., width // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def naive_llama(both, positions, weights, config):
    """Queries, keys and values [T, heads, width] of the layer's input [T, 2H], and the softmax scale."""
    q, k, v = (both @ weights[f"midlayer.self_attn.{n}_proj.weight"].T for n in "qkv")
    q, k, v = (x.view(len(x), -1, config.head_dim) for x in (q, k, v))
    group = config.num_heads // config.num_kv_heads
    k = naive_rope(k, positions, config).repeat_interleave(group, 1)
    return naive_rope(q, positions, config), k, v.repeat_interleave(group, 1), config.head_dim**-0.5


def naive_mla(both, positions, weights, config):
    """The same of DeepSeek's attention: low-rank queries, keys and values, and one rotated key part for all heads."""
    part = {name.removeprefix("midlayer.self_attn."): weight for name, weight in weights.items()}
    nope, rank, heads = config.qk_nope_head_dim, config.kv_lora_rank, config.num_heads
    low = naive_norm(both @ part["q_a_proj.weight"].T, part["q_a_layernorm.weight"], config)
    q = (low @ part["q_b_proj.weight"].T).view(len(both), heads, -1)
    q = torch.cat([q[..., :nope], naive_rope(q[..., nope:], positions, config)], -1)
    low = both @ part["kv_a_proj_with_mqa.weight"].T
    shared = naive_rope(low[:, None, rank:], positions, config).expand(-1, heads, -1)
    low = naive_norm(low[:, :rank], part["kv_a_layernorm.weight"], config)
    kv = (low @ part["kv_b_proj.weight"].T).view(len(both), heads, -1)
    scale = q.shape[-1] ** -0.5
    if "mscale_all_dim" in config.rope:  # DeepSeek's YaRN
        scale *= (0.1 * config.rope["mscale_all_dim"] * math.log(config.rope["factor"]) + 1) ** 2
    return q, torch.cat([kv[..., :nope], shared], -1), kv[..., nope:], scale


def naive_loss(kind, logits, teacher, best):
    """One slot's loss; teacher: probabilities over the draft vocabulary; best: the draft id of the teacher's choice."""
    log_draft = logits.log_softmax(0)
    draft = log_draft.exp()
    acceptance = torch.minimum(draft, teacher).sum()
    if kind == "hard":
        return -log_draft[best]
    if kind == "lk_alpha":
        return -acceptance.log()
    if kind == "lk_lambda":
        weight = torch.exp(-3 * acceptance.detach())
        divergence, distance = (teacher * (teacher.log() - log_draft)).sum(), (draft - teacher).abs().sum() / 2
        return weight * divergence + (1 - weight) * distance
    return -(teacher * log_draft).sum()


def naive_training_time_test(model, batch, target_head, num_steps, kind="soft", decay=0.8):
    """Loss, loss by step and accuracy by step, with T×(i+1)·T masks and a Python loop over slots for the loss."""
    weights = dict(model.named_parameters())
    config = model.config
    total = len(batch.input_ids)
    target_ids = [int(i) for i in model.t2d.nonzero().flatten()]
    queries_keys_values = naive_mla if config.layer_kind == "mla" else naive_llama

    def norm(x, name):
        return naive_norm(x, weights[name], config)

    aux = batch.aux
    if config.fc_norm:
        aux = torch.stack([norm(aux[:, i], f"fc_norm.{i}.weight") for i in range(aux.shape[1])], 1)
    hidden = aux.flatten(1) @ weights["fc.weight"].T
    same = batch.document_ids[:, None] == batch.document_ids[None]
    causal = same & (torch.arange(total)[:, None] >= torch.arange(total)[None])
    keys, values, masks, losses, accuracies = [], [], [], [], []
    padded = torch.cat([batch.input_ids, torch.zeros(num_steps + 2, dtype=torch.long)])
    for step in range(num_steps):
        embedding = model.embed_tokens[padded[1 + step : 1 + step + total]]
        both = torch.cat(
            [norm(embedding, "midlayer.input_layernorm.weight"), norm(hidden, "midlayer.hidden_norm.weight")], -1
        )
        q, k, v, scale = queries_keys_values(both, batch.position_ids + step, weights, config)
        keys.append(k)
        values.append(v)
        masks.append(torch.eye(total).bool() if step else causal)
        scores = torch.einsum("qhd,khd->hqk", q, torch.cat(keys)) * scale
        attention = scores.masked_fill(~torch.cat(masks, 1), float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", attention, torch.cat(values)).reshape(total, -1)
        hidden = hidden + mixed @ weights["midlayer.self_attn.o_proj.weight"].T
        x = norm(hidden, "midlayer.post_attention_layernorm.weight")
        gate, up = (x @ weights[f"midlayer.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        hidden = hidden + (gate * torch.sigmoid(gate) * up) @ weights["midlayer.mlp.down_proj.weight"].T
        normed = norm(hidden, "norm.weight")
        logits = normed @ weights["lm_head.weight"].T
        loss, right, supervised = 0.0, 0, 0
        for slot in range(total):
            predicted = slot + 2 + step
            if predicted >= total or not same[slot, predicted] or not batch.loss_mask[predicted]:
                continue
            supervised += 1
            teacher = target_head @ batch.final[batch.final_index[predicted - 1]]
            best = int(teacher.argmax())
            if best not in target_ids:
                continue
            loss = loss + naive_loss(kind, logits[slot], teacher[target_ids].softmax(0), target_ids.index(best))
            right += target_ids[int(logits[slot].argmax())] == best
        losses.append(loss / max(supervised, 1))
        accuracies.append((right, supervised))
        if config.norm_output:
            hidden = normed
    return sum(decay**i * loss for i, loss in enumerate(losses)), losses, accuracies


def unroll(model, target_head, batch, num_steps=4, attend=None, **options):
    """Our own unroll of a batch with weights 0.8^i and small chunks: (result, plan)."""
    plan = plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, num_steps)
    weights = tuple(0.8**i for i in range(num_steps))
    options = UnrollOptions(step_weights=weights, **({"chunk_bytes": 3000} | options))
    teacher = Teacher(target_head, model.target_ids, PLAIN_LOGITS)
    attend = attend(plan) if attend else None
    return training_time_test(model, batch, plan, teacher, options, attend=attend), plan
