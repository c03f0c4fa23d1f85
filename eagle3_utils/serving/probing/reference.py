"""The reference for captured layers: a Hugging Face forward of the same checkpoint, where it fits into memory."""

from __future__ import annotations

import psutil
import torch

from eagle3_utils.serving.launch.checks import check_model
from eagle3_utils.target import Target

_FLOAT32_LIMIT_BYTES = 4 << 30  # smaller checkpoints are run in float32, a truer reference than bf16


def fits_in_memory(target: Target) -> bool:
    """Whether a forward on the CPU fits, with room to spare, into memory that is available now."""
    needed = _loaded_bytes(target)
    return needed * 1.5 < psutil.virtual_memory().available and needed < 64e9


def huggingface_boundaries(target: Target, input_ids: list[int]) -> torch.Tensor:
    """Hidden states of every boundary, float32 [T, n + 1, H]; the last one is after the final norm, as HF gives it.

    Boundary b is HF's `hidden_states[b]`: 0 the embedding, b the output of layer b - 1.
    """
    from transformers import AutoModelForCausalLM

    dtype = torch.float32 if _is_small(target) else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(
        target.path, dtype=dtype, attn_implementation="eager", trust_remote_code=target.trust_remote_code
    ).eval()
    with torch.inference_mode():
        output = model(torch.tensor([input_ids]), output_hidden_states=True, use_cache=False)
    return torch.stack([state[0].float() for state in output.hidden_states], dim=1)


def _is_small(target: Target) -> bool:
    return check_model(target.path) < _FLOAT32_LIMIT_BYTES


def _loaded_bytes(target: Target) -> int:
    return check_model(target.path) * (2 if _is_small(target) else 1)
