"""Reference speculative decoding with an EAGLE-3 draft: readable top to bottom, lossless, one sequence at a time.

    model = load_reference_model(target)
    plain = plain_decode(model, prompt_ids, max_new_tokens=64)
    fast = speculative_decode(model, draft, prompt_ids, 64, TreeShape(num_steps=3), aux_layers)
    assert fast.output_ids == plain.output_ids

`speculative_decode` is the whole algorithm; what it leans on (the two caches, the tree, the acceptance rule) follows it
or is in tree.py. It is not fast: no batch, no CUDA graphs, Python between the steps. It is what served figures are
compared with.

Where the draft stands: slot t takes the token t + 1 and the target's auxiliary states at t, at RoPE position t, and
predicts token t + 2. Drafting goes on from the last slot at positions t + 1, t + 2, … on the draft's own states;
after a verification these slots are thrown away and filled again from the target's real states, as SGLang does
(eagle_worker_v2.py `_draft_extend_for_decode`).

Legend: T prompt tokens, N nodes, K branches, L auxiliary layers, H hidden, V vocabulary, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from eagle3_utils.acceptance.tree import Tree, TreeShape, draw_chain, grow_tree
from eagle3_utils.draft.network import DraftCache, DraftModel
from eagle3_utils.errors import UserError
from eagle3_utils.target import Target


@dataclass(frozen=True)
class Decoded:
    """What a decoding gave. ``output_ids`` ends with the stop token, if one was generated."""

    output_ids: list[int]
    num_accepted: list[int]  # draft tokens accepted, per verification; empty for plain decoding

    @property
    def num_verifications(self) -> int:
        return len(self.num_accepted)


def load_reference_model(
    target: Target, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """The target as a transformers model; in float32 one token at a time and several at once agree to the last bits."""
    disable_progress_bar()  # a bar per tensor does not belong into a notebook
    model = AutoModelForCausalLM.from_pretrained(
        target.path, dtype=dtype, attn_implementation="sdpa", trust_remote_code=target.trust_remote_code
    )
    return model.to(device).eval()


@torch.inference_mode()
def plain_decode(
    model: PreTrainedModel,
    input_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Decoded:
    """One token per forward with a KV cache: what speculative decoding must equal."""
    target = _TargetState(model, aux_layers=())
    logits_NV, _ = target.forward(torch.tensor(input_ids, device=model.device), num_logits=1)
    output_ids = [_choose(logits_NV[-1], temperature, generator)]
    while not _finished(output_ids, max_new_tokens, stop_ids):
        logits_NV, _ = target.forward(torch.tensor(output_ids[-1:], device=model.device))
        output_ids.append(_choose(logits_NV[-1], temperature, generator))
    return Decoded(output_ids, [])


@torch.inference_mode()
def speculative_decode(
    model: PreTrainedModel,
    draft: DraftModel,
    input_ids: Sequence[int],
    max_new_tokens: int,
    shape: TreeShape,
    aux_layers: Sequence[int],
    stop_ids: Sequence[int] = (),
    temperature: float = 0.0,
    draw_drafts: bool = False,
    generator: torch.Generator | None = None,
) -> Decoded:
    """Decode with a draft; the output is that of `plain_decode`, token for token, or in distribution when sampling.

    Parameters
    ----------
    shape : the tree, in SGLang's three numbers.
    aux_layers : 0-based target layers whose outputs feed the draft, in the order of training.
    temperature : 0 is greedy. Above it, the target's token is drawn at each node and the tree is followed while it has
        the drawn token (SGLang's "target only" rule with its thresholds at 1).
    draw_drafts : for a chain and a temperature above 0: draw the draft's tokens too, and accept by rejection sampling
        (Leviathan et al. 2023), which accepts with probability Σ min(p, q).
    """
    if draw_drafts and (shape.topk > 1 or temperature <= 0):
        raise UserError("draw_drafts needs a chain (topk 1) and a temperature above 0")
    target, drafter = _TargetState(model, aux_layers), DraftState(draft)
    prompt_T = torch.tensor(input_ids, device=model.device)

    logits_NV, aux_TLH = target.forward(prompt_T, num_logits=1)
    output_ids = [_choose(logits_NV[-1], temperature, generator)]
    hidden_H, logits_D = drafter.extend(aux_TLH, [*input_ids[1:], output_ids[0]])  # slot t takes token t + 1
    num_accepted = []

    while not _finished(output_ids, max_new_tokens, stop_ids):
        # Draft: a tree (or chain) of guesses under the last token.
        if draw_drafts:
            start = (output_ids[-1], hidden_H, logits_D, draft.target_ids, drafter.step)
            tree = draw_chain(*start, shape.num_steps, temperature, generator)
        else:
            tree = grow_tree(output_ids[-1], hidden_H, logits_D, draft.target_ids, drafter.step, shape)

        # Verify: one target forward over all nodes, each seeing its ancestors only.
        logits_NV, aux_NLH = target.forward(tree.token_ids, tree.depths(), tree.mask())
        if draw_drafts:
            path, bonus_id = accept_by_rejection(tree, logits_NV, draft.target_ids, temperature, generator)
        else:
            path, bonus_id = accept(tree, logits_NV, temperature, generator)

        # Keep: the accepted path stays in the target's cache, its real states refill the draft's.
        new_ids = [*tree.token_ids[path[1:]].tolist(), bonus_id]
        target.keep(path)
        hidden_H, logits_D = drafter.extend(aux_NLH[path], new_ids)
        output_ids += new_ids
        num_accepted.append(len(path) - 1)
    return Decoded(cut(output_ids, max_new_tokens, stop_ids), num_accepted)


def accept(
    tree: Tree, logits_NV: torch.Tensor, temperature: float = 0.0, generator: torch.Generator | None = None
) -> tuple[list[int], int]:
    """The nodes accepted, root first, and the token the target gives after them.

    The target chooses its next token at a node; as long as the tree has that token below the node, go there. So every
    token is the target's own choice, and the output has exactly the target's distribution.
    """
    path = [0]
    while True:
        token_id = _choose(logits_NV[path[-1]], temperature, generator)
        below = [child for child in tree.children(path[-1]) if int(tree.token_ids[child]) == token_id]
        if not below:
            return path, token_id
        path.append(below[0])


def accept_by_rejection(
    tree: Tree,
    logits_NV: torch.Tensor,
    target_ids_D: torch.Tensor,
    temperature: float,
    generator: torch.Generator | None = None,
) -> tuple[list[int], int]:
    """As `accept`, for a chain whose tokens were drawn from the draft's distribution q (``tree.draft_probs``).

    A token x is accepted with probability min(1, p(x) / q(x)); the first that is not is replaced by one drawn from
    max(0, p − q), normalised. The output has the target's distribution p (Leviathan et al. 2023, theorem 3.5).
    """
    probs_NV = (logits_NV.float() / temperature).softmax(-1)
    for node in range(1, len(tree.parents)):
        draft_probs_V = torch.zeros_like(probs_NV[0])
        draft_probs_V[target_ids_D] = tree.draft_probs[node - 1]
        token_id = int(tree.token_ids[node])
        coin = torch.rand((), generator=generator, device=probs_NV.device)
        if coin * draft_probs_V[token_id] >= probs_NV[node - 1, token_id]:
            residual_V = (probs_NV[node - 1] - draft_probs_V).clamp_min(0)
            return list(range(node)), int(torch.multinomial(residual_V, 1, generator=generator))
    return list(range(len(tree.parents))), int(torch.multinomial(probs_NV[-1], 1, generator=generator))


class _TargetState:
    """The target and its KV cache."""

    def __init__(self, model: PreTrainedModel, aux_layers: Sequence[int]):
        if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()):
            raise UserError("reference decoding knows full attention only; this target has sliding-window layers")
        self.model, self.aux_layers = model, list(aux_layers)
        self.cache = DynamicCache()
        self.length = 0  # tokens kept

    def forward(
        self,
        token_ids_N: torch.Tensor,
        depths_N: torch.Tensor | None = None,
        mask_NN: torch.Tensor | None = None,
        num_logits: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [N, V] (the last ``num_logits`` rows, 0: all) and auxiliary states [N, L, H].

        Causal unless given a tree. With a tree the new rows do not count as kept until `keep` says which.
        """
        num_tokens, mask = len(token_ids_N), None
        if mask_NN is None:
            depths_N = torch.arange(num_tokens, device=token_ids_N.device)
        else:
            seen = torch.ones(num_tokens, self.length, dtype=torch.bool, device=mask_NN.device)
            mask = torch.cat([seen, mask_NN], dim=1)[None, None]
        result = self.model(
            input_ids=token_ids_N[None],
            position_ids=(self.length + depths_N)[None],
            attention_mask=mask,
            past_key_values=self.cache,
            output_hidden_states=bool(self.aux_layers),
            logits_to_keep=num_logits,
        )
        if mask_NN is None:
            self.length += num_tokens
        if not self.aux_layers:
            return result.logits[0], None
        return result.logits[0], torch.stack([result.hidden_states[layer + 1][0] for layer in self.aux_layers], dim=1)

    def keep(self, path: list[int]) -> None:
        """Of the rows of the last tree, keep those of ``path``, in its order."""
        rows = torch.tensor([*range(self.length), *(self.length + node for node in path)], device=self.model.device)
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[:, :, rows], layer.values[:, :, rows]
        self.length += len(path)


class DraftState:
    """The draft and its KV cache: one slot per token whose auxiliary states the target has given."""

    def __init__(self, draft: DraftModel):
        self.draft = draft
        self.cache = DraftCache()
        self.length = 0  # slots filled from real states

    def extend(self, aux_NLH: torch.Tensor, next_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Drop drafted slots, fill N new ones from the target's states; the last slot's hidden [H] and logits [D]."""
        self.cache.truncate(self.length)
        device = aux_NLH.device
        positions_N = self.length + torch.arange(len(next_ids), device=device)
        token_ids_N = torch.tensor(next_ids, device=device)
        hidden_NH, logits_ND = self.draft.decode_step(self.draft.project(aux_NLH), token_ids_N, positions_N, self.cache)
        self.length += len(next_ids)
        return hidden_NH[-1], logits_ND[-1]

    def step(
        self, hidden_KH: torch.Tensor, token_ids_K: torch.Tensor, step: int, lineage: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One drafting step of K branches (`tree.DraftStep`): each sees all real slots and its own drafted ones."""
        num_branches = len(token_ids_K)
        positions_K = torch.full_like(token_ids_K, self.length - 1 + step)
        mask = torch.zeros(num_branches, self.length + step * num_branches, dtype=torch.bool, device=hidden_KH.device)
        mask[:, : self.length] = True
        levels = torch.arange(step, device=lineage.device)[:, None] * num_branches
        mask[torch.arange(num_branches, device=lineage.device).expand(step, -1), self.length + levels + lineage] = True
        return self.draft.decode_step(hidden_KH, token_ids_K, positions_K, self.cache, mask)


def _choose(logits_V: torch.Tensor, temperature: float, generator: torch.Generator | None) -> int:
    if temperature <= 0:
        return int(logits_V.argmax())
    return int(torch.multinomial((logits_V.float() / temperature).softmax(-1), 1, generator=generator))


def _finished(output_ids: list[int], max_new_tokens: int, stop_ids: Sequence[int]) -> bool:
    return len(output_ids) >= max_new_tokens or any(token_id in stop_ids for token_id in output_ids)


def cut(output_ids: list[int], max_new_tokens: int, stop_ids: Sequence[int]) -> list[int]:
    """Up to ``max_new_tokens``, ending at the first stop token: a verification may run past either."""
    for index, token_id in enumerate(output_ids):
        if token_id in stop_ids:
            return output_ids[: min(index + 1, max_new_tokens)]
    return output_ids[:max_new_tokens]
