"""Speculative decoding: lossless for any draft, its bookkeeping equal to a slow recomputation, exact when sampling."""

import numpy as np
import pytest
import torch
from small_models import AUX_LAYERS, VOCAB, small_draft, small_model

from eagle3_utils.acceptance.speculate import accept, accept_by_rejection, plain_decode, speculative_decode
from eagle3_utils.acceptance.tree import Tree, TreeShape
from eagle3_utils.devices import one_torch_thread
from eagle3_utils.draft.network import DraftCache
from eagle3_utils.errors import UserError

SHAPES = [TreeShape(1), TreeShape(3), TreeShape(3, 3, 8), TreeShape(4, 2, 9, "ancestors"), TreeShape(2, 4, 21)]


@pytest.fixture(scope="module")
def model():
    with one_torch_thread():
        yield small_model()


@pytest.fixture(scope="module")
def draft(model):
    return small_draft(model)


def prompts(number):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB, (n + 2,), generator=generator).tolist() for n in range(number)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_output_equals_plain_greedy_token_for_token_with_a_random_draft(model, draft, shape):
    accepted = 0
    for prompt in prompts(3):
        plain = plain_decode(model, prompt, 30)
        fast = speculative_decode(model, draft, prompt, 30, shape, AUX_LAYERS)
        assert fast.output_ids == plain.output_ids
        assert len(plain.output_ids) == 30
        accepted += sum(fast.num_accepted)
    assert accepted > 0  # rejected drafts only would not show that accepted ones are handled


def test_a_stop_token_and_the_length_limit_cut_an_accepted_run(model, draft):
    for prompt in prompts(3):
        free = plain_decode(model, prompt, 24).output_ids
        stop = free[9]
        expected = free[: free.index(stop) + 1]
        for shape in (TreeShape(3), TreeShape(3, 3, 8)):
            assert speculative_decode(model, draft, prompt, 24, shape, AUX_LAYERS, [stop]).output_ids == expected
            assert speculative_decode(model, draft, prompt, 7, shape, AUX_LAYERS).output_ids == free[:7]
        assert plain_decode(model, prompt, 24, [stop]).output_ids == expected


def slow_chain_decode(model, draft, prompt, max_new_tokens, num_steps):
    """Chain speculation without any cache: everything is computed again from token 0 at every turn."""
    tokens, accepted = list(prompt), []
    with torch.inference_mode():
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        while len(tokens) - len(prompt) < max_new_tokens:
            known = torch.tensor([tokens[:-1]])
            states = model(known, output_hidden_states=True).hidden_states
            aux = torch.cat([states[layer + 1][0] for layer in AUX_LAYERS], dim=-1)
            cache, drafted = DraftCache(), []
            hidden, logits = draft.decode_step(
                draft.project(aux), torch.tensor(tokens[1:]), torch.arange(len(tokens) - 1), cache
            )
            for step in range(num_steps):
                draft_id = int(logits[-1].argmax())
                drafted.append(draft_id + int(draft.d2t[draft_id]))
                position = torch.tensor([len(tokens) - 1 + step])
                hidden, logits = draft.decode_step(hidden[-1:], torch.tensor(drafted[-1:]), position, cache)
            choice = model(torch.tensor([tokens + drafted])).logits[0, len(tokens) - 1 :].argmax(-1).tolist()
            number = next((n for n in range(num_steps) if drafted[n] != choice[n]), num_steps)
            tokens += choice[: number + 1]
            accepted.append(number)
    return tokens[len(prompt) :][:max_new_tokens], accepted


def test_caches_refilled_after_each_verification_equal_recomputation_from_scratch(model, draft):
    total = 0
    for prompt in prompts(3):
        expected_ids, expected_accepted = slow_chain_decode(model, draft, prompt, 30, 3)
        fast = speculative_decode(model, draft, prompt, 30, TreeShape(3), AUX_LAYERS)
        assert (fast.output_ids, fast.num_accepted) == (expected_ids, expected_accepted)
        total += sum(expected_accepted)
    assert total > 0


class Oracle:
    """A draft that knows the plain output: at position t it predicts token t + 2, wrongly where ``wrong`` says so."""

    def __init__(self, sequence, wrong=()):
        self.sequence, self.wrong = sequence + [0] * 16, set(wrong)
        self.target_ids = torch.arange(VOCAB)

    def project(self, aux):
        return aux[:, 0]

    def decode_step(self, hidden, token_ids, position_ids, cache, mask=None):
        cache.append(token_ids[:, None, None], token_ids[:, None, None])
        predicted = [self.sequence[p + 2] + (p + 2 in self.wrong) for p in position_ids.tolist()]
        return hidden, torch.nn.functional.one_hot(torch.tensor(predicted) % VOCAB, VOCAB).float() * 10


def test_a_perfect_draft_is_accepted_whole_and_a_wrong_token_ends_the_run_where_it_stands(model):
    prompt = prompts(4)[3]
    plain = plain_decode(model, prompt, 25).output_ids  # 1 from prefill, then 6 times 4
    perfect = speculative_decode(model, Oracle(prompt + plain), prompt, 25, TreeShape(3), AUX_LAYERS)
    assert perfect.num_accepted == [3] * 6
    assert (perfect.num_verifications, len(perfect.output_ids) - 1) == (6, 24)
    start = len(prompt)
    flawed = Oracle(prompt + plain, wrong=[start + 2, start + 6])
    result = speculative_decode(model, flawed, prompt, 25, TreeShape(3), AUX_LAYERS)
    # token 0: prefill; 1 accepted, 2 replaced by the target; 3, 4, 5 accepted, 6 the bonus (its wrong draft unused)
    assert result.num_accepted[:3] == [1, 3, 3]
    assert result.output_ids == plain


def chi_square(counts, probs):
    """Pearson's statistic and its 99.9 % bound, cells with fewer than 5 expected joined."""
    from scipy.stats import chi2

    expected = np.asarray(probs) * counts.sum()
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    return ((counts - expected) ** 2 / expected).sum(), chi2.ppf(0.999, len(counts) - 1)


def test_rejection_sampling_gives_the_targets_distribution_whatever_the_drafts():
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(3, 6, generator=generator) * 1.5
    target_ids = torch.tensor([0, 2, 3, 5])  # tokens 1 and 4 cannot be drafted
    draft_probs = (torch.randn(2, 4, generator=generator) * 1.5).softmax(-1)
    first, second, overlap = np.zeros(6), np.zeros((6, 6)), 0
    for _ in range(3000):
        drawn = torch.multinomial(draft_probs, 1, generator=generator)[:, 0]
        tree = Tree(torch.cat([torch.tensor([0]), target_ids[drawn]]), [-1, 0, 1], draft_probs)
        path, bonus = accept_by_rejection(tree, logits_NV, target_ids, 0.8, generator)
        given = [*tree.token_ids[path[1:]].tolist(), bonus]
        first[given[0]] += 1
        overlap += len(path) > 1
        if len(path) > 1:
            second[0, given[1]] += 1
    probs = (logits_NV / 0.8).softmax(-1).numpy()
    statistic, bound = chi_square(first, probs[0])
    assert statistic < bound
    statistic, bound = chi_square(second[0], probs[1])
    assert statistic < bound
    draft_over_target = np.zeros(6)
    draft_over_target[target_ids] = draft_probs[0]
    assert overlap / 3000 == pytest.approx(np.minimum(draft_over_target, probs[0]).sum(), abs=0.03)


def test_following_a_tree_while_drawing_from_the_target_gives_the_targets_distribution():
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(3, 5, generator=generator)
    tree = Tree(torch.tensor([9, 1, 3]), [-1, 0, 0])  # two children of the root: tokens 1 and 3
    counts = np.zeros(5)
    for _ in range(4000):
        path, bonus = accept(tree, logits_NV, 1.0, generator)
        counts[int(tree.token_ids[path[1]]) if len(path) > 1 else bonus] += 1
    statistic, bound = chi_square(counts, logits_NV[0].softmax(-1).numpy())
    assert statistic < bound


@pytest.mark.parametrize("shape, draw_drafts", [(TreeShape(2, 3, 6), False), (TreeShape(2), True)], ids=str)
def test_sampled_third_token_has_the_distribution_of_plain_sampling(model, draft, shape, draw_drafts):
    prompt, temperature, runs = [3, 1, 4], 1.5, 200
    with torch.inference_mode():  # exact: sum over every pair of first tokens
        pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
        whole = torch.cat([torch.tensor(prompt).expand(len(pairs), -1), pairs], dim=1)
        probs = (model(whole).logits / temperature).softmax(-1)
        weight = probs[:, 2].gather(1, pairs[:, :1])[:, 0] * probs[:, 3].gather(1, pairs[:, 1:])[:, 0]
        exact = (weight[:, None] * probs[:, 4]).sum(0).double().numpy()
    generator = torch.Generator().manual_seed(2)
    counts = np.zeros(VOCAB)
    for _ in range(runs):
        result = speculative_decode(model, draft, prompt, 3, shape, AUX_LAYERS, (), temperature, draw_drafts, generator)
        counts[result.output_ids[2]] += 1
    statistic, bound = chi_square(counts, exact / exact.sum())
    assert statistic < bound


def test_drawn_drafts_need_a_chain_and_a_temperature(model, draft):
    with pytest.raises(UserError, match="needs a chain"):
        speculative_decode(model, draft, [1, 2], 4, TreeShape(2, 2, 4), AUX_LAYERS, temperature=1.0, draw_drafts=True)
    with pytest.raises(UserError, match="temperature"):
        speculative_decode(model, draft, [1, 2], 4, TreeShape(2), AUX_LAYERS, draw_drafts=True)
