"""Which settings of a server capture refuses, and which ranks write.

Each rule says what SGLang 0.5.14 does under that setting. Plain attributes in, plain values out: nothing of SGLang is
imported, so every rule can be tried without a GPU.
"""

from typing import Any


class CaptureRefused(RuntimeError):
    """The server was started in a way that would corrupt what is captured."""


def refuse_unsafe(server_args: Any) -> None:
    """Raise `CaptureRefused`, with every reason, for settings under which rows are missing or not the model's own."""
    args, graphs = server_args, getattr(server_args, "cuda_graph_config", None)
    reasons = {
        "--pp-size > 1: the layers of earlier stages are elsewhere": args.pp_size > 1,
        "the radix cache is on: cached rows are never computed (--disable-radix-cache)": not args.disable_radix_cache,
        "speculative decoding is on: batches hold draft tokens": args.speculative_algorithm is not None,
        "disaggregated prefill/decode": args.disaggregation_mode != "null",
        "prefill CUDA graphs replay without the hooks (--cuda-graph-backend-prefill disabled)": (
            graphs is not None and graphs.prefill.backend != "disabled"
        ),
        "two-batch overlap: layers of a split batch are not handed out": args.enable_two_batch_overlap,
        "prefill multiplexing splits a forward pass into parts": args.enable_pdmux,
        "context parallelism: a prompt's rows lie on several ranks": args.attn_cp_size > 1,
        # The next layer's norm then sums over ranks, after the model has handed out this layer's output: small
        # batches would hold one rank's partial sum (models/gpt_oss.py, glm4_moe.py; switched on by itself on SM90).
        "all-reduce fusion hands out sums of one rank only (--enforce-disable-flashinfer-allreduce-fusion)": (
            args.tp_size > 1
            and (args.flashinfer_allreduce_fusion_backend is not None or args.enable_aiter_allreduce_fusion)
        ),
    }
    found = [reason for reason, is_so in reasons.items() if is_so]
    if found:
        raise CaptureRefused("capture refuses to start: " + "; ".join(found))


def writing_rank(parallel: Any, dp_rank: int | None) -> int | None:
    """The number of this process among those that write, or None when another rank writes its rows.

    Tensor-parallel ranks all hold the same rows: the first of each group writes. With data parallelism, of the whole
    model or of attention only, each group has requests of its own and so a writer of its own, numbered by `dp_rank`.

    Parameters
    ----------
    parallel : SGLang's `get_parallel()`; ranks within the attention's tensor- and context-parallel groups are read.
    dp_rank : the model runner's; None without data parallelism.
    """
    if parallel.attn_tp_rank != 0 or parallel.attn_cp_rank != 0:
        return None
    return dp_rank or 0
