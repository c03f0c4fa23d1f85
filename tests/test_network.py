"""The draft network: decoding equals the unroll it was trained with; its state dict is SGLang's."""

import pytest
import torch
from draft_reference import MLA, PLAIN_LOGITS, random_batch, small_config, small_model

from eagle3_utils.draft.network import DraftCache, DraftModel
from eagle3_utils.draft.unroll import UnrollOptions, training_time_test, unrolled_hidden
from eagle3_utils.draft.unrolling.attention import eager_attention
from eagle3_utils.draft.unrolling.plan import plan_unroll
from eagle3_utils.draft.unrolling.teacher import Teacher
from eagle3_utils.draft.vocab import vocab_map_of

KINDS = [{}, {"fc_norm": True, "norm_output": True}, MLA]


@pytest.mark.parametrize("changes", KINDS, ids=["llama", "eagle-3.1", "mla"])
def test_decoding_equals_the_training_unroll(changes):
    model, _ = small_model(**changes)
    batch, steps = random_batch([20], ["0" * 5 + "1" * 15]), 4
    plan = plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, steps)
    outputs = unrolled_hidden(model, batch, plan, eager_attention(plan))
    for slot in (3, 9, 14):
        row, cache = int((plan.rows == slot).nonzero()), DraftCache()
        positions = torch.arange(slot + 1)
        hidden, logits = model.decode_step(
            model.project(batch.aux[: slot + 1]), batch.input_ids[1 : slot + 2], positions, cache
        )
        hidden, logits = hidden[-1:], logits[-1:]
        for step in range(steps):
            torch.testing.assert_close(logits[0], model.lm_head(outputs[step][row]), atol=1e-5, rtol=1e-4)
            token = batch.input_ids[slot + 2 + step : slot + 3 + step]
            hidden, logits = model.decode_step(hidden, token, torch.tensor([slot + step + 1]), cache)


def test_truncated_cache_decodes_as_if_the_rows_had_never_been():
    model, _ = small_model()
    batch, cache = random_batch([8], ["1" * 8]), DraftCache()
    hidden = model.project(batch.aux)
    model.decode_step(hidden[:5], batch.input_ids[1:6], torch.arange(5), cache)
    once = model.decode_step(hidden[5:6], batch.input_ids[6:7], torch.tensor([5]), cache)
    cache.truncate(5)
    again = model.decode_step(hidden[5:6], batch.input_ids[6:7], torch.tensor([5]), cache)
    assert len(cache) == 6 and torch.equal(once[1], again[1])


def test_tree_mask_lets_siblings_ignore_each_other():
    model, _ = small_model()
    batch = random_batch([6], ["1" * 6])
    hidden = model.project(batch.aux[:4])
    alone = []
    for token in (3, 4):
        cache = DraftCache()
        model.decode_step(hidden[:3], batch.input_ids[1:4], torch.arange(3), cache)
        alone.append(model.decode_step(hidden[3:], torch.tensor([token]), torch.tensor([3]), cache)[1][0])
    cache = DraftCache()
    model.decode_step(hidden[:3], batch.input_ids[1:4], torch.arange(3), cache)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]).bool()
    both = hidden[3:].expand(2, -1)
    _, logits = model.decode_step(both, torch.tensor([3, 4]), torch.tensor([3, 3]), cache, mask)
    torch.testing.assert_close(logits, torch.stack(alone), atol=1e-5, rtol=1e-5)


def test_mla_draft_trains_every_weight():
    model, head = small_model(**MLA)
    batch = random_batch([30])
    plan = plan_unroll(batch.loss_mask, batch.cu_seqlens, batch.final_index, 3)
    options = UnrollOptions((1.0, 0.8, 0.64))
    training_time_test(model, batch, plan, Teacher(head, model.target_ids, PLAIN_LOGITS), options).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


def test_state_dict_has_sglangs_names_and_no_embedding():
    model, _ = small_model(fc_norm=True)
    expected = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    expected |= {f"fc_norm.{i}.weight" for i in range(3)}
    expected |= {f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"}
    expected |= {f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    expected |= {f"midlayer.{n}.weight" for n in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    assert set(model.state_dict()) == expected


def test_placed_model_keeps_the_embeddings_dtype():
    config = small_config()
    vocab = vocab_map_of(torch.arange(config.draft_vocab_size), config.vocab_size)
    model = DraftModel(config, vocab, torch.randn(config.vocab_size, config.hidden_size).bfloat16())
    model.place("cpu", torch.float32)
    assert model.embed_tokens.dtype == torch.bfloat16 and model.fc.weight.dtype == torch.float32
    assert model.embed(torch.tensor([1])).dtype == torch.float32
