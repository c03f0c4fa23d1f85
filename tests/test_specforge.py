"""Our unroll beside SpecForge 0.2.0's own module: equal where its definition can be mapped onto ours.

Run it with SPECFORGE_DIR=DIR after `pip install --no-deps --target DIR specforge==0.2.0`.

Where the definitions differ, seen from a slot t at step i, which predicts token t+2+i:
- SpecForge takes the loss mask at t+i; we take that of the predicted token. Shifting its mask by two maps one onto the
  other.
- It divides each step's sum by all B·T positions; we divide by the supervised ones.
- At the end of a document it also trains predictions of tokens that do not exist (teacher: the last states).
"""

import os
import sys

import pytest
import torch
from draft_reference import DRAFT_VOCAB, HIDDEN, VOCAB, random_batch, small_model, unroll

STEPS = 4


@pytest.fixture(scope="module")
def specforge():
    """`losses(model, head, batch, mask)`: SpecForge's loss and accuracy by step, with our weights, float32."""
    if os.environ.get("SPECFORGE_DIR"):
        sys.path.append(os.environ["SPECFORGE_DIR"])
    pytest.importorskip(
        "specforge", reason="needs specforge 0.2.0: pip install --no-deps --target DIR; SPECFORGE_DIR=DIR"
    )
    os.environ.setdefault("SPECFORGE_DEVICE", "cpu")
    import specforge.algorithms.eagle3.model as module
    import torch._dynamo
    from specforge.core import loss
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    class PlainLoss:  # its Triton kernel has no CPU build; this is its own reference formula
        apply = staticmethod(loss._compute_loss)

    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=1, vocab_size=VOCAB, rms_norm_eps=1e-5, max_position_embeddings=256, pad_token_id=0,
        rope_theta=10000.0, tie_word_embeddings=False,
    )  # fmt: skip
    config.draft_vocab_size, config.target_hidden_size = DRAFT_VOCAB, HIDDEN

    def losses(model, head, batch, mask):
        draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        missing, unexpected = draft.load_state_dict(state | {"embed_tokens.weight": model.embed_tokens}, strict=False)
        assert not unexpected and all("rotary" in name or "inv_freq" in name for name in missing)
        theirs = module.OnlineEagle3Model(draft, length=STEPS, attention_backend="sdpa")
        final = torch.zeros(batch.num_tokens, HIDDEN)
        needed = batch.final_index >= 0
        final[needed] = batch.final[batch.final_index[needed]]
        logits, ids = torch.zeros(1, batch.num_tokens, VOCAB), torch.zeros(1, batch.num_tokens, dtype=torch.long)
        logits[0, :-1], ids[0, :-1] = (final @ head.T)[1:], batch.input_ids[1:]  # as its own TargetHead shifts them
        outputs = theirs(
            input_ids=ids, attention_mask=torch.ones_like(ids), target=logits, loss_mask=mask.long()[None, :, None],
            hidden_states=batch.aux.flatten(1)[None],
        )  # fmt: skip
        return draft, outputs[0], [float(accuracy) for accuracy in outputs[2]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.config, "disable", True)
        patch.setattr(module, "LogSoftmaxLoss", PlainLoss)
        yield losses


def shifted(mask):
    return torch.cat([mask[2:], torch.zeros(2, dtype=mask.dtype)])


@pytest.mark.parametrize("answers", ["1" * 24, "0" * 6 + "1" * 8 + "0" * 4 + "1" * 6])
def test_loss_accuracy_and_gradients_equal_specforges_once_its_mask_is_shifted(specforge, answers):
    model, head = small_model()
    batch = random_batch([24], [answers])
    result, plan = unroll(model, head, batch, STEPS)
    result.loss.backward()
    draft, losses, accuracy = specforge(model, head, batch, shifted(batch.loss_mask))
    scale = [batch.num_tokens / float(count) for count in plan.num_supervised]
    ours = result.counts.summary()
    assert ours["loss"] == pytest.approx([float(x.detach()) * s for x, s in zip(losses, scale, strict=True)], abs=1e-5)
    assert ours["accuracy"] == pytest.approx(accuracy, abs=1e-6)
    sum(0.8**step * loss * scale[step] for step, loss in enumerate(losses)).backward()
    theirs = dict(draft.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=1e-5, rtol=1e-4, msg=name)


def test_its_own_mask_trains_two_prompt_slots_too_few_and_two_answer_slots_too_many(specforge):
    model, head = small_model()
    batch = random_batch([24], ["0" * 10 + "1" * 10 + "0" * 4])
    batch.final, batch.final_index = torch.randn(24, HIDDEN), torch.arange(24)  # it wants states where we want none
    supervised_slots = shifted(batch.loss_mask).nonzero().flatten().tolist()
    their_slots = batch.loss_mask.nonzero().flatten().tolist()
    assert supervised_slots[:2] == [8, 9] and supervised_slots[-1] == 17
    assert sorted(set(their_slots) - set(supervised_slots)) == [18, 19]
    _, unshifted, _ = specforge(model, head, batch, batch.loss_mask)
    _, mapped, _ = specforge(model, head, batch, shifted(batch.loss_mask))
    assert abs(float(unshifted[0]) - float(mapped[0])) > 0.01


def test_its_loss_halves_when_half_of_the_batch_is_padding(specforge):
    model, head = small_model()
    batch, padded = random_batch([20], ["1" * 20]), random_batch([40], ["1" * 20 + "0" * 20])
    for name in ("input_ids", "aux"):
        getattr(padded, name)[:20] = getattr(batch, name)
    padded.final[:19] = batch.final
    _, short, _ = specforge(model, head, batch, shifted(batch.loss_mask))
    _, long, _ = specforge(model, head, padded, shifted(padded.loss_mask))
    assert [float(a) / float(b) for a, b in zip(short, long, strict=True)] == pytest.approx([2.0] * STEPS, rel=1e-4)
    ours = [unroll(model, head, each, STEPS)[0].counts.summary()["loss"] for each in (batch, padded)]
    assert ours[0] == pytest.approx(ours[1], abs=1e-5)
