"""Draft trees: the same nodes as SGLang's own functions choose, and as a search written out by hand."""

import itertools

import pytest
import torch

from eagle3_utils.acceptance.tree import Tree, TreeShape, draw_chain, grow_tree
from eagle3_utils.errors import UserError

VOCAB, HIDDEN = 13, 4
TARGET_IDS = torch.arange(VOCAB) * 2 + 1


def fake_step(hidden_KH, token_ids_K, step, lineage):
    """Logits and states that depend on the branch's state and token only, so that a path fixes them."""
    del lineage
    seeds = (hidden_KH.double().sum(-1) * 1000).round().long() * 31 + token_ids_K * 7 + step
    rows = [torch.randn(VOCAB + HIDDEN, generator=torch.Generator().manual_seed(int(seed) % 2**31)) for seed in seeds]
    stacked = torch.stack(rows)
    return stacked[:, :HIDDEN], stacked[:, HIDDEN:] * 2


def start(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(HIDDEN, generator=generator), torch.randn(VOCAB, generator=generator) * 2


@pytest.mark.parametrize("shape", [TreeShape(3), TreeShape(2, 3, 6), TreeShape(4, 2, 9), TreeShape(3, 4, 20)], ids=str)
def test_the_tree_has_the_nodes_that_sglang_selects(shape):
    from sglang.srt.speculative import spec_utils
    from sglang.srt.speculative.eagle_utils import organize_draft_results

    hidden_H, logits_D = start(shape.num_steps)
    topk = shape.topk
    topk_p, topk_index = logits_D.softmax(-1)[None].topk(topk)
    topk_index = TARGET_IDS[topk_index]
    hidden, scores, lists = hidden_H[None], None, ([], [], [])
    with torch.compiler.set_stance("force_eager"):
        for step in range(shape.num_steps):
            input_ids, hidden, scores, info = spec_utils.select_top_k_tokens(
                step, topk_p, topk_index, hidden, scores, topk
            )
            for collected, item in zip(lists, info, strict=True):
                collected.append(item)
            if step < shape.num_steps - 1:
                hidden, logits = fake_step(hidden, input_ids, step + 1, None)
                topk_p, topk_index = logits.softmax(-1).topk(topk)
                topk_index = TARGET_IDS[topk_index]
    parent_list, selected, token_ids = organize_draft_results(*lists, shape.num_draft_tokens)
    # the kernel's rule: candidate c hangs below candidate parent_list[c // topk], the first topk below the root
    selected, parent_list = selected[0].tolist(), parent_list[0].tolist()
    parents = [0 if c < topk else 1 + selected.index(parent_list[c // topk]) for c in selected]

    tree = grow_tree(5, hidden_H, logits_D, TARGET_IDS, fake_step, shape)
    assert tree.token_ids.tolist() == [5, *token_ids[0].tolist()]
    assert tree.parents == [-1, *parents]


def test_a_full_tree_holds_the_most_probable_paths_of_an_exhaustive_search():
    shape = TreeShape(2, 3, 13)  # 3 + 9 candidates, all kept
    hidden_H, logits_D = start(0)
    tree = grow_tree(5, hidden_H, logits_D, TARGET_IDS, fake_step, shape)
    first = logits_D.topk(3).indices.tolist()
    expected = {(int(TARGET_IDS[token]),) for token in first}
    for token in first:
        _, logits = fake_step(hidden_H[None], TARGET_IDS[torch.tensor([token])], 1, None)
        expected |= {(int(TARGET_IDS[token]), int(TARGET_IDS[below])) for below in logits[0].topk(3).indices.tolist()}
    paths = set()
    for node in range(1, 13):
        path = []
        while node:
            path.insert(0, int(tree.token_ids[node]))
            node = tree.parents[node]
        paths.add(tuple(path))
    assert paths == expected


def test_a_chain_is_the_likeliest_token_step_after_step():
    hidden_H, logits_D = start(3)
    tree = grow_tree(5, hidden_H, logits_D, TARGET_IDS, fake_step, TreeShape(4))
    expected, hidden, logits = [5], hidden_H[None], logits_D[None]
    for step in range(1, 5):
        expected.append(int(TARGET_IDS[logits[0].argmax()]))
        hidden, logits = fake_step(hidden, torch.tensor(expected[-1:]), step, None)
    assert tree.token_ids.tolist() == expected
    assert tree.parents == [-1, 0, 1, 2, 3]


def test_mask_depths_and_children_follow_the_parents():
    tree = Tree(torch.arange(6), [-1, 0, 0, 1, 3, 2])
    assert tree.depths().tolist() == [0, 1, 1, 2, 3, 2]
    assert [tree.children(node) for node in range(6)] == [[1, 2], [3], [5], [4], [], []]
    ancestors = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 3, 4}, {0, 2, 5}]
    mask = tree.mask()
    for row, column in itertools.product(range(6), range(6)):
        assert bool(mask[row, column]) == (column in ancestors[row])


@pytest.mark.parametrize("memory, first_lineage", [("slots", [0, 1]), ("ancestors", [1, 1])])
def test_branch_memory_slots_keep_their_own_keys_and_ancestors_follow_the_path(memory, first_lineage):
    """Both best paths of step 2 come from slot 1: its key is what "ancestors" reads, SGLang's "slots" reads its own."""
    seen = []

    def step(hidden_KH, token_ids_K, number, lineage):
        seen.append(lineage.tolist())
        logits = torch.zeros(2, VOCAB)
        if number == 1:
            logits[1, 3:5] = 8.0  # the second branch is sure of two tokens, the first of none
        return hidden_KH, logits

    logits_D = torch.zeros(VOCAB)
    logits_D[[1, 2]] = torch.tensor([5.1, 5.0])
    grow_tree(5, torch.zeros(HIDDEN), logits_D, TARGET_IDS, step, TreeShape(3, 2, 6, memory))
    assert seen == [[[0, 1]], [first_lineage, [0, 1]]]


def test_a_parent_of_equal_score_is_kept_before_its_child():
    def sure(hidden_KH, token_ids_K, number, lineage):
        logits = torch.full((len(token_ids_K), VOCAB), -200.0)
        logits[:, 4] = 200.0  # probability exactly 1: child and parent have the same score
        return hidden_KH, logits

    tree = grow_tree(5, torch.zeros(HIDDEN), torch.zeros(VOCAB), TARGET_IDS, sure, TreeShape(4, 2, 4))
    assert all(parent < node for node, parent in enumerate(tree.parents))


def test_a_drawn_chain_carries_the_distributions_it_was_drawn_from():
    hidden_H, logits_D = start(1)
    generator = torch.Generator().manual_seed(0)
    tree = draw_chain(5, hidden_H, logits_D, TARGET_IDS, fake_step, 3, 0.7, generator)
    torch.testing.assert_close(tree.draft_probs[0], (logits_D / 0.7).softmax(-1))
    _, logits = fake_step(hidden_H[None], tree.token_ids[1:2], 1, None)
    torch.testing.assert_close(tree.draft_probs[1], (logits[0] / 0.7).softmax(-1))
    assert tree.draft_probs.shape == (3, VOCAB) and tree.parents == [-1, 0, 1, 2]


@pytest.mark.parametrize(
    "numbers, message",
    [((3, 1, 5), "topk 1 is a chain"), ((2, 2, 8), "has 2 to 7"), ((2, 2, 1), "has 2 to 7"), ((2, 2, 4, "x"), "slots")],
)
def test_shapes_that_cannot_be_are_refused(numbers, message):
    with pytest.raises(UserError, match=message):
        TreeShape(*numbers)
