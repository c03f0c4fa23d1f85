"""The Triton kernels, without a GPU: run by Triton's interpreter beside the plain formulas, and compiled for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_own_keys import random_inputs

from eagle3_utils.draft.unrolling.own_keys import gradients_plainly, merge_plainly

SHAPES = [
    dict(num_heads=6, num_kv=2, width=8, value_width=8),  # three heads to a key: no power of two
    dict(num_heads=2, num_kv=2, width=12, value_width=5, num_own=1),  # as MLA: a key for each head, other widths
]


def compare_with_the_formulas():
    """In a process of its own: what Triton's own functions are is decided when it is imported."""
    from eagle3_utils.draft.unrolling import own_keys_kernels

    for shape in SHAPES:
        inputs = random_inputs(num_rows=3, **shape)
        merged, expected = own_keys_kernels.merge(*inputs, 0.3), merge_plainly(*inputs, 0.3)
        torch.testing.assert_close(merged, expected)
        attended, _, places, query, keys, values = inputs
        upstream, by_place = torch.rand(expected[0].shape), torch.rand(len(attended), *query.shape[1:])
        work = upstream, *expected, query, keys, values, 0.3, by_place, places
        found, wanted = own_keys_kernels.gradients(*work), gradients_plainly(*work)
        torch.testing.assert_close(found, wanted)
        print("agrees:", shape)


def test_interpreted_kernels_agree_with_the_formulas():
    pytest.importorskip("triton")
    call = [sys.executable, "-c", "import test_own_keys_kernels as this; this.compare_with_the_formulas()"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(call, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("agrees:")) == (0, len(SHAPES)), done.stderr[-2000:]


@pytest.mark.parametrize("name", ["_merge", "_gradients"])
def test_kernels_compile_for_hopper(name, monkeypatch, tmp_path):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from eagle3_utils.draft.unrolling import own_keys_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(own_keys_kernels, name)
    sizes = {"G": 3, "E": 192, "F": 128, "G_BLOCK": 4, "E_BLOCK": 256, "F_BLOCK": 128}
    types = {"lse": "*fp32", "out_lse": "*fp32", "places": "*i64", "scale": "fp32"}
    types |= dict.fromkeys(("num_own", "num_kv", "lse_by_place", "lse_by_head"), "i32") | dict.fromkeys(
        sizes, "constexpr"
    )
    signature = {argument: types.get(argument, "*bf16") for argument in kernel.arg_names}
    constants = {(kernel.arg_names.index(size),): value for size, value in sizes.items()}
    source = triton.compiler.ASTSource(kernel, signature, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
    assert ".target sm_90" in compiled.asm["ptx"] and "cubin" in compiled.asm
