"""Settings under which capture would be wrong are refused with every reason; one rank of each group writes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from eagle3_utils.serving.capture.settings import CaptureRefused, refuse_unsafe, writing_rank


def arguments(**changes) -> SimpleNamespace:
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend="disabled"), decode=SimpleNamespace(backend="full"))
    safe = {
        "pp_size": 1, "tp_size": 8, "disable_radix_cache": True, "speculative_algorithm": None,
        "disaggregation_mode": "null", "cuda_graph_config": graphs, "enable_two_batch_overlap": False,
        "enable_pdmux": False, "attn_cp_size": 1, "flashinfer_allreduce_fusion_backend": None,
        "enable_aiter_allreduce_fusion": False,
    }  # fmt: skip
    return SimpleNamespace(**(safe | changes))


def test_safe_settings_pass_with_cuda_graphs_for_decoding():
    refuse_unsafe(arguments())
    refuse_unsafe(arguments(cuda_graph_config=None))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pp_size": 2}, "earlier stages are elsewhere"),
        ({"disable_radix_cache": False}, "the radix cache is on"),
        ({"speculative_algorithm": "EAGLE3"}, "draft tokens"),
        ({"disaggregation_mode": "prefill"}, "disaggregated"),
        ({"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="breakable"))}, "prefill CUDA graphs"),
        ({"enable_two_batch_overlap": True}, "two-batch overlap"),
        ({"enable_pdmux": True}, "multiplexing"),
        ({"attn_cp_size": 2}, "several ranks"),
        ({"flashinfer_allreduce_fusion_backend": "auto"}, "sums of one rank only"),
        ({"enable_aiter_allreduce_fusion": True}, "sums of one rank only"),
    ],
)
def test_each_unsafe_setting_is_refused_by_name(changes, words):
    with pytest.raises(CaptureRefused, match=words):
        refuse_unsafe(arguments(**changes))


def test_all_reasons_are_given_at_once():
    with pytest.raises(CaptureRefused, match=r"radix cache is on.*; .*draft tokens"):
        refuse_unsafe(arguments(disable_radix_cache=False, speculative_algorithm="NGRAM"))


def test_one_rank_has_nothing_to_fuse():
    refuse_unsafe(arguments(tp_size=1, flashinfer_allreduce_fusion_backend="auto"))


def ranks(tp_size: int, attn_dp_size: int = 1, dp_rank: int | None = None) -> list[int | None]:
    """Who writes, for every tensor-parallel rank; ranks as SGLang lays them out: attention DP outside, its TP inside.

    `dp_rank` stands for a whole replica of the model; with attention DP each rank's own is counted.
    """
    attn_tp_size = tp_size // attn_dp_size
    found = []
    for tp_rank in range(tp_size):
        parallel = SimpleNamespace(attn_tp_rank=tp_rank % attn_tp_size, attn_cp_rank=0)
        own = tp_rank // attn_tp_size if attn_dp_size > 1 else dp_rank
        found.append(writing_rank(parallel, own))
    return found


def test_of_tensor_parallel_ranks_the_first_writes():
    assert ranks(1) == [0]
    assert ranks(8) == [0] + [None] * 7


def test_of_each_attention_dp_group_the_first_rank_writes():
    assert ranks(8, attn_dp_size=4) == [0, None, 1, None, 2, None, 3, None]
    assert ranks(8, attn_dp_size=8) == list(range(8))


def test_each_replica_of_the_model_has_its_own_writer():
    assert [ranks(2, dp_rank=replica) for replica in range(3)] == [[0, None], [1, None], [2, None]]


def test_ranks_that_share_a_prompt_do_not_write_it_twice():
    assert writing_rank(SimpleNamespace(attn_tp_rank=0, attn_cp_rank=1), 0) is None
