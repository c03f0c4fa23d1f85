"""Types for parameters whose rule a plain annotation does not say; `config.py` annotates its fields with them.

Imports nothing heavy: parameters are checked before anything else is loaded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ValidationInfo


def tree_problem(num_steps: int, topk: int = 1, num_draft_tokens: int | None = None) -> str | None:
    """Why there is no draft tree with these numbers, which acceptance/tree.py explains; None when there is one.

    ``num_draft_tokens`` counts the root; None means ``num_steps`` + 1.
    """
    if num_steps < 1 or topk < 1:
        return f"num_steps and topk must be at least 1, not {num_steps} and {topk}"
    if num_draft_tokens is None:
        num_draft_tokens = num_steps + 1
    if topk == 1 and num_draft_tokens != num_steps + 1:
        return f"topk 1 is a chain: num_draft_tokens must be num_steps + 1 = {num_steps + 1}"
    most = 1 + topk + (num_steps - 1) * topk**2
    if not 2 <= num_draft_tokens <= most:
        return f"num_draft_tokens {num_draft_tokens}: this tree has 2 to {most}, the root counted"
    return None


def _checked_shape(numbers: list[int]) -> list[int]:
    problem = tree_problem(*numbers) if 1 <= len(numbers) <= 3 else "write [num_steps, topk, num_draft_tokens]"
    if problem:
        raise ValueError(problem)
    return numbers


def _completed_shape(num_draft_tokens: int | None, others: ValidationInfo) -> int | None:
    known = [others.data[name] for name in ("num_steps", "topk") if name in others.data]
    if len(known) == 2:  # else one of them is wrong itself, and said to be
        _checked_shape([*known, num_draft_tokens])
    return num_draft_tokens


TreeNumbers = Annotated[list[int], AfterValidator(_checked_shape)]  # [num_steps, topk, num_draft_tokens]
NumDraftTokens = Annotated[int | None, AfterValidator(_completed_shape)]  # of a model that has num_steps and topk too


def _word_of_switch(value: Any) -> Any:
    return ("off", "on")[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_word_of_switch)]  # YAML reads on and off as booleans
