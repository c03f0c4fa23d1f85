"""Stage parameters → SGLang's command line, with safe defaults per device, and a refusal of what corrupts capture."""

from __future__ import annotations

from pathlib import Path

from eagle3_utils.config import ServingOptions
from eagle3_utils.errors import UserError
from eagle3_utils.serving.launch import gpus
from eagle3_utils.target import Target

_CPU_MAX_TOTAL_TOKENS = 32_768  # KV cache slots; SGLang's own default takes most of a laptop's memory
_RESERVED_POSITIONS = 16
_WATCHDOG_SECONDS = 1800  # SGLang kills itself when one batch takes longer; capture may wait for room within a batch
LONGER_CONTEXT_VARIABLE = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
_FORBIDDEN = {
    "--pp-size": "the layers of earlier pipeline stages are on other ranks",
    "--pipeline-parallel-size": "the layers of earlier pipeline stages are on other ranks",
    "--speculative-algorithm": "batches would hold draft tokens",
    "--enable-two-batch-overlap": "layers of a split batch are not handed out",
    "--enable-pdmux": "a forward pass would be split into parts",
    "--attn-cp-size": "a prompt's rows would lie on several ranks",
    "--attention-context-parallel-size": "a prompt's rows would lie on several ranks",
    "--flashinfer-allreduce-fusion-backend": "layers would hand out sums of one rank only",
    "--enable-aiter-allreduce-fusion": "layers would hand out sums of one rank only",
    "--disaggregation-mode": "prefill and decode would be on different servers",
}


def resolve_device(options: ServingOptions) -> str:
    """ "cpu" or "cuda": what `device: auto` means here."""
    if options.device != "auto":
        return options.device
    return "cuda" if gpus.free_bytes() else "cpu"


def resolve_dtype(options: ServingOptions) -> str:
    """The dtype the model is served in; `dtype: auto` is bfloat16, but float32 on a CPU that has no bf16 units.

    There float32 matrix products are six times as fast (AVX2, one core: 50 against 7.7 GFLOP/s). Dumps are bf16 anyway.
    """
    if options.dtype != "auto":
        return options.dtype
    if resolve_device(options) == "cuda":
        return "bfloat16"
    return "bfloat16" if cpu_has_bf16_units() else "float32"


def cpu_has_bf16_units() -> bool:
    """Whether /proc/cpuinfo names AMX or AVX-512 bf16 instructions; False where there is no such file."""
    path = Path("/proc/cpuinfo")
    flags = set(path.read_text().split()) if path.is_file() else set()
    return bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})


def attention_data_parallel(options: ServingOptions) -> bool:
    """Whether the data-parallel groups share the tensor-parallel ranks, instead of being copies of the whole model."""
    return options.dp_size > 1 and options.tp_size > 1


def server_command(
    python: str, options: ServingOptions, target: Target, port: int, extracting: bool, extra: list[str] = ()
) -> list[str]:
    """The whole command line of a server on 127.0.0.1.

    `extracting` adds `capture_flags`. `options.extra_server_args` and `extra` come last, so they win.
    """
    device = resolve_device(options)
    command = [python, "-m", "sglang.launch_server", "--model-path", str(target.path)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--device", device]
    command += ["--dtype", resolve_dtype(options)]
    command += ["--sleep-on-idle", "--log-level-http", "warning"]
    if options.tp_size > 1:
        command += ["--tp-size", str(options.tp_size)]
    if options.ep_size > 1:
        command += ["--ep-size", str(options.ep_size)]
    if options.dp_size > 1:
        command += ["--dp-size", str(options.dp_size)]
        if attention_data_parallel(options):
            command += ["--enable-dp-attention"]
    for flag, value in (
        ("--mem-fraction-static", options.mem_fraction_static),
        ("--chunked-prefill-size", options.chunked_prefill_size),
        ("--max-running-requests", options.max_running_requests),
        ("--attention-backend", options.attention_backend or ("torch_native" if device == "cpu" else None)),
    ):
        if value is not None:
            command += [flag, str(value)]
    if options.disable_custom_all_reduce and options.tp_size > 1:
        command += ["--disable-custom-all-reduce"]
    disable_overlap = device == "cpu" if options.disable_overlap_schedule is None else options.disable_overlap_schedule
    if disable_overlap:
        command += ["--disable-overlap-schedule"]
    if device == "cpu":
        command += ["--skip-server-warmup", "--max-total-tokens", str(_CPU_MAX_TOTAL_TOKENS)]
        if options.max_running_requests is None:
            command += ["--max-running-requests", "64"]
    if target.trust_remote_code:
        command += ["--trust-remote-code"]
    if extracting:
        command += capture_flags(options, target)
        refuse_unsafe([*options.extra_server_args, *extra])
    return [*command, *options.extra_server_args, *extra]


def capture_flags(options: ServingOptions, target: Target) -> list[str]:
    """What a server that captures needs; nothing in it concerns the plugin.

    No radix cache: cached rows are never computed. No CUDA graphs: a prefill graph replays without the hooks, and
    nothing decodes. No all-reduce fusion: a captured layer's output would not be summed over ranks yet.
    """
    flags = ["--disable-radix-cache"]
    flags += ["--cuda-graph-backend-prefill", "disabled", "--cuda-graph-backend-decode", "disabled"]
    flags += ["--watchdog-timeout", str(_WATCHDOG_SECONDS)]
    if options.tp_size > 1:
        flags += ["--enforce-disable-flashinfer-allreduce-fusion"]
    context_length = longer_context(options, target)
    if context_length:
        flags += ["--context-length", str(context_length)]
    return flags


def longer_context(options: ServingOptions, target: Target) -> int | None:
    """The context length the server must be told so that samples of the model's full length are taken; else None.

    SGLang keeps a few positions for tokens it might generate (managers/tp_worker.py, `max_req_input_len`), which
    extraction never does. It allows more than the model's own length only with `LONGER_CONTEXT_VARIABLE` set.
    """
    needed = getattr(options, "max_seq_len", 0) + _RESERVED_POSITIONS
    return needed if needed > target.max_position_embeddings else None


def refuse_unsafe(arguments: list[str]) -> None:
    """Raise `UserError` for a flag under which captured rows would be missing or wrong."""
    for argument in arguments:
        flag = argument.split("=", 1)[0]
        if flag in _FORBIDDEN:
            raise UserError(f"{flag} cannot be used with capture: {_FORBIDDEN[flag]}", "extra_server_args")
