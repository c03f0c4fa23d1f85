"""The Hugging Face reference for captured layers."""

from __future__ import annotations

import dataclasses

import torch

from eagle3_utils.serving.probing import reference
from eagle3_utils.target import load_embed_tokens, load_target


def test_boundary_zero_is_the_embedding_and_there_is_one_more_than_layers(tiny_llama):
    target = load_target(str(tiny_llama))
    ids = [5, 7, 11]
    hidden = reference.huggingface_boundaries(target, ids)
    assert hidden.shape == (3, target.num_layers + 1, target.hidden_size) and hidden.dtype == torch.float32
    assert torch.equal(hidden[:, 0], load_embed_tokens(target)[torch.tensor(ids)].float())


def test_a_small_target_fits_and_a_huge_one_does_not(tiny_llama, tmp_path, monkeypatch):
    target = load_target(str(tiny_llama))
    assert reference.fits_in_memory(target)
    monkeypatch.setattr(reference, "check_model", lambda _path: 1 << 40)
    assert not reference.fits_in_memory(dataclasses.replace(target, path=tmp_path))
