"""Draft trees as SGLang grows them, a chain being the tree with one branch.

Three numbers say everything (SGLang's flags `--speculative-num-steps`, `--speculative-eagle-topk` and
`--speculative-num-draft-tokens`): the draft looks `num_steps` tokens ahead; at every step each of `topk` branches
offers its `topk` likeliest tokens and the `topk` best paths go on; of all tokens offered the `num_draft_tokens - 1`
with the best path probability are kept, and verified together with the root, the last token the target gave.

Source: sglang/srt/speculative/spec_utils.py `select_top_k_tokens`, eagle_utils.py `organize_draft_results`; EAGLE-2
(Li et al. 2024) for the idea. Legend: N nodes, K topk, C candidates, H hidden, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from eagle3_utils.errors import UserError
from eagle3_utils.parameter_types import tree_problem


@dataclass(frozen=True)
class TreeShape:
    """The three numbers of SGLang; ``num_draft_tokens`` counts the root. The default is a chain.

    ``branch_memory`` says which drafted keys a branch attends to. "slots" is what SGLang does: branch b reads the keys
    that branch slot b wrote at earlier steps, also when its path has come from another slot (kernel
    `generate_draft_decode_kv_indices`). "ancestors" reads those of the path itself. A chain cannot tell them apart,
    and neither changes what is generated, only how much of the draft is accepted.
    """

    num_steps: int
    topk: int = 1
    num_draft_tokens: int | None = None
    branch_memory: str = "slots"

    def __post_init__(self):
        if self.num_draft_tokens is None:
            object.__setattr__(self, "num_draft_tokens", self.num_steps + 1)
        if problem := tree_problem(self.num_steps, self.topk, self.num_draft_tokens):
            raise UserError(problem)
        if self.branch_memory not in ("slots", "ancestors"):
            raise UserError(f"branch_memory {self.branch_memory!r}: use 'slots' or 'ancestors'")


@dataclass(frozen=True)
class Tree:
    """The nodes to verify, parents before children; node 0 is the root.

    token_ids : int64 [N], target vocabulary. parents : −1 for the root. draft_probs : float32 [N − 1, D], only for a
    chain that was drawn: row n − 1 is the distribution node n was drawn from.
    """

    token_ids: torch.Tensor
    parents: list[int]
    draft_probs: torch.Tensor | None = None

    def depths(self) -> torch.Tensor:
        """Distance from the root, int64 [N]."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return torch.tensor(depths, device=self.token_ids.device)

    def mask(self) -> torch.Tensor:
        """bool [N, N]: True where the row's node may attend to the column's, i.e. to its ancestors and itself."""
        mask = torch.eye(len(self.parents), dtype=torch.bool, device=self.token_ids.device)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask

    def children(self, node: int) -> list[int]:
        """Nodes whose parent is ``node``, the likeliest path first."""
        return [child for child, parent in enumerate(self.parents) if parent == node]


# (hidden [K, H], token_ids [K], step, lineage [step, K]) → (hidden [K, H], logits [K, D]): one draft forward over the
# branches, step = 1, 2, …; branch b reads the key that slot lineage[s, b] wrote at step s + 1.
DraftStep = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def grow_tree(
    root_id: int,
    hidden_H: torch.Tensor,
    logits_D: torch.Tensor,
    target_ids_D: torch.Tensor,
    draft_step: DraftStep,
    shape: TreeShape,
) -> Tree:
    """The likeliest tokens under ``root_id``, from the draft's last state and logits.

    ``target_ids_D`` maps draft ids to target ids. A path's probability is the product of its tokens' softmax over the
    draft vocabulary.
    """
    topk = shape.topk
    slots_K = torch.arange(topk, device=logits_D.device)
    path_probs_K, draft_ids_K = logits_D.float().softmax(-1).topk(topk)
    tokens, scores, parents = [target_ids_D[draft_ids_K]], [path_probs_K], [torch.full_like(draft_ids_K, -1)]
    num_candidates, frontier_K = topk, slots_K  # frontier: the candidates that go on
    hidden_KH, lineage = hidden_H.expand(topk, -1), slots_K[None, :]
    for step in range(1, shape.num_steps):
        hidden_KH, logits_KD = draft_step(hidden_KH, torch.cat(tokens)[frontier_K], step, lineage)
        probs_KK, draft_ids_KK = logits_KD.float().softmax(-1).topk(topk)
        path_probs_C = (path_probs_K[:, None] * probs_KK).flatten()
        tokens.append(target_ids_D[draft_ids_KK].flatten())
        scores.append(path_probs_C)
        parents.append(frontier_K.repeat_interleave(topk))
        path_probs_K, best_K = path_probs_C.topk(topk)
        frontier_K, num_candidates = num_candidates + best_K, num_candidates + topk * topk
        hidden_KH = hidden_KH[best_K // topk]  # best_K // topk: the slot a surviving path comes from
        if shape.branch_memory == "ancestors":
            lineage = lineage[:, best_K // topk]
        lineage = torch.cat([lineage, slots_K[None, :]])
    return _keep_best(root_id, torch.cat(tokens), torch.cat(scores), torch.cat(parents), shape.num_draft_tokens - 1)


def draw_chain(
    root_id: int,
    hidden_H: torch.Tensor,
    logits_D: torch.Tensor,
    target_ids_D: torch.Tensor,
    draft_step: DraftStep,
    num_steps: int,
    temperature: float,
    generator: torch.Generator | None = None,
) -> Tree:
    """A chain drawn from the draft's own distribution at ``temperature``, for exact rejection sampling."""
    tokens, probs = [], []
    hidden_KH, lineage = hidden_H[None, :], torch.zeros(1, 1, dtype=torch.long, device=logits_D.device)
    for step in range(1, num_steps + 1):
        probs.append((logits_D.float() / temperature).softmax(-1))
        tokens.append(target_ids_D[torch.multinomial(probs[-1], 1, generator=generator)])
        if step < num_steps:
            hidden_KH, logits_KD = draft_step(hidden_KH, tokens[-1], step, lineage.expand(step, 1))
            logits_D = logits_KD[0]
    root = torch.tensor([root_id], device=logits_D.device)
    return Tree(torch.cat([root, *tokens]), [-1, *range(num_steps)], torch.stack(probs))


def _keep_best(
    root_id: int, tokens_C: torch.Tensor, scores_C: torch.Tensor, parents_C: torch.Tensor, num_kept: int
) -> Tree:
    """The ``num_kept`` best candidates under a root. A stable sort keeps a parent before a child of equal score."""
    kept = scores_C.sort(descending=True, stable=True).indices[:num_kept].sort().values
    node_of = {-1: 0} | {candidate: node for node, candidate in enumerate(kept.tolist(), start=1)}
    root = torch.tensor([root_id], device=tokens_C.device)
    return Tree(torch.cat([root, tokens_C[kept]]), [-1, *(node_of[c] for c in parents_C[kept].tolist())])
