"""A random target and a random draft so small that a thousand forwards take a second."""

from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_utils.draft.network import DraftConfig, DraftModel
from eagle3_utils.draft.training.initial import draw_matrices
from eagle3_utils.draft.unroll import UnrollOptions, training_time_test
from eagle3_utils.draft.unrolling.plan import plan_unroll
from eagle3_utils.draft.unrolling.teacher import Teacher
from eagle3_utils.draft.vocab import vocab_map_of

VOCAB, HIDDEN, AUX_LAYERS = 12, 32, (0, 1, 2)


def small_model() -> LlamaForCausalLM:
    """Random Llama of 3 layers whose greedy output does not settle on one token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def small_draft(model: LlamaForCausalLM) -> DraftModel:
    """Random draft over a vocabulary that leaves tokens 0 and 7 out."""
    torch.manual_seed(1)
    config = DraftConfig(
        hidden_size=HIDDEN, intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=VOCAB,
        draft_vocab_size=VOCAB - 2, aux_layers=AUX_LAYERS, max_position_embeddings=256,
    )  # fmt: skip
    vocab = vocab_map_of(torch.tensor([1, 2, 3, 4, 5, 6, 8, 9, 10, 11]), VOCAB)
    draft = DraftModel(config, vocab, model.get_input_embeddings().weight.detach())
    draw_matrices(draft, std=0.3)
    return draft.eval()


def trained_draft(model: LlamaForCausalLM, batches: list, num_steps: int = 120) -> DraftModel:
    """The small draft after it has learnt these one-sample batches by heart."""
    plain_logits = SimpleNamespace(logit_scale=1.0, logit_softcap=None)
    draft = small_draft(model)
    learn(draft, Teacher(model.lm_head.weight.detach(), draft.target_ids, plain_logits), batches, num_steps)
    return draft.eval()


def learn(draft: DraftModel, teacher: Teacher, batches: list, num_steps: int) -> None:
    """Train a draft on one-sample batches, one after the other."""
    plans = [plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, 3) for batch in batches]
    optimizer = torch.optim.Adam(draft.parameters(), lr=1e-2)
    for step in range(num_steps):
        batch, plan = batches[step % len(batches)], plans[step % len(batches)]
        optimizer.zero_grad()
        training_time_test(draft, batch, plan, teacher, UnrollOptions((1.0, 1.0, 1.0))).loss.backward()
        optimizer.step()
