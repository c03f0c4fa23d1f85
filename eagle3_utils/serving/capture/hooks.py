"""The four places where capture touches SGLang 0.5.14, installed through its own hook registry.

    ModelRunner.init_aux_hidden_state_capture   after the model is loaded: boundaries on, handshake written
    ForwardBatch.init_new                       before a forward: which requests are in it
    LogitsProcessor.forward                     the auxiliary and final states of all rows pass here
    SchedulerOutputStreamer.stream_output       a wanted request without a dump is answered with an error

Every rank switches the boundaries on (the model may gather them collectively); only the first rank of a tensor-parallel
or attention-DP group records.
"""

import hashlib
import json
import logging
import os
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel
from sglang.version import __version__ as sglang_version

from .layers import BoundaryTap, UnsupportedModel, switch_on, switched_on
from .recorder import Forward, Recorder, boundaries_json
from .rows import RID_PREFIX
from .settings import CaptureRefused, refuse_unsafe, writing_rank
from .staging import Staging
from .transfer import DirectTransfer, StreamTransfer
from .writer import Writer

logger = logging.getLogger(__name__)
_recorder: Recorder | None = None  # this process's, when it is a writing rank


def install() -> None:
    """Register the hooks; SGLang applies them before its engine starts. A second call changes nothing."""
    if getattr(HookRegistry, "_eagle3_capture", False):
        return
    HookRegistry._eagle3_capture = True
    at = "sglang.srt."
    for target, hook, kind in (
        ("model_executor.model_runner.ModelRunner.init_aux_hidden_state_capture", enable, HookType.AFTER),
        ("model_executor.forward_batch_info.ForwardBatch.init_new", before_forward, HookType.BEFORE),
        ("layers.logits_processor.LogitsProcessor.forward", around_logits, HookType.AROUND),
        (
            "managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
            before_answer,
            HookType.BEFORE,
        ),
    ):
        HookRegistry.register(at + target, hook, kind)


def enable(_result: None, model_runner: Any) -> None:
    """The model is loaded: switch its boundaries on and, on a writing rank, open shop and say so."""
    global _recorder
    refuse_unsafe(model_runner.server_args)
    config = model_runner.model_config.hf_text_config
    num_layers = config.num_hidden_layers
    boundaries = [layer + 1 for layer in json.loads(os.environ["SGLANG_HS_LAYERS"])]
    if (
        boundaries != sorted(set(boundaries))
        or not boundaries
        or not 0 <= boundaries[0] <= boundaries[-1] <= num_layers
    ):
        raise CaptureRefused(f"SGLANG_HS_LAYERS must rise and lie in -1…{num_layers - 1}")
    native = boundaries[0] > 0 and boundaries[-1] < num_layers and switch_on(model_runner.model, boundaries)
    if native and switched_on(model_runner.model) != boundaries:
        raise UnsupportedModel(f"{type(model_runner.model).__name__} keeps {switched_on(model_runner.model)}")
    rank = writing_rank(get_parallel(), model_runner.dp_rank)
    if rank is None:
        return
    tap = None if native else BoundaryTap(model_runner.model, num_layers, boundaries)
    _recorder = _make_recorder(model_runner, boundaries, tap)
    facts = handshake_facts(model_runner, boundaries, native)
    name = "handshake.json" if rank == 0 else f"handshake.{rank}.json"
    path = Path(os.environ["SGLANG_HS_DUMP_DIR"]) / name
    path.with_suffix(".tmp").write_text(json.dumps(facts, indent=1))
    path.with_suffix(".tmp").rename(path)
    logger.warning("[HS_DUMP] enabled: dump to %s, boundaries %s", path.parent, boundaries)


def before_forward(_cls: type, batch: Any, _model_runner: Any) -> None:
    if _recorder is not None and batch.forward_mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        _recorder.begin(batch.reqs)


def around_logits(
    original,
    self,
    input_ids: torch.Tensor,
    hidden_states: torch.Tensor,
    lm_head: Any,
    logits_metadata: Any,
    aux_hidden_states: list[torch.Tensor] | None = None,
    hidden_states_before_norm: torch.Tensor | None = None,
) -> Any:
    """Record, then go on without the auxiliary states: the original would only index them and throw them away."""
    if (
        _recorder is not None
        and isinstance(logits_metadata, ForwardBatch)
        and logits_metadata.forward_mode in (ForwardMode.EXTEND, ForwardMode.MIXED)
    ):
        forward = Forward.of(logits_metadata, hidden_states, aux_hidden_states)
        if forward is not None:
            _recorder.record(forward)
    return original(self, input_ids, hidden_states, lm_head, logits_metadata, None, hidden_states_before_norm)


def before_answer(_self: Any, reqs: list, *_args: Any, **_kwargs: Any) -> None:
    """A wanted request that ends without a dump must not look like a success."""
    if _recorder is None:
        return
    for req in reqs:
        if req.rid.startswith(RID_PREFIX) and req.finished() and not isinstance(req.finished_reason, FINISH_ABORT):
            problem = _recorder.problem(req)
            if problem:
                logger.error("[HS_DUMP] %s: %s", req.rid, problem)
                req.finished_reason = FINISH_ABORT(
                    f"hidden states not captured: {problem}", HTTPStatus.INTERNAL_SERVER_ERROR, "CaptureError"
                )


def handshake_facts(model_runner: Any, boundaries: list[int], native: bool) -> dict[str, Any]:
    """What the launcher checks, and what the fingerprint of the dumps is made of."""
    args, parallel, config = model_runner.server_args, get_parallel(), model_runner.model_config
    return {
        "pid": os.getpid(),
        "nonce": os.environ.get("SGLANG_HS_NONCE", ""),
        "started": time.time(),
        "sglang_version": sglang_version,
        "torch_version": torch.__version__,
        "capture_hash": source_hash(),
        "model_path": args.model_path,
        "model_class": type(model_runner.model).__name__,
        "num_layers": config.hf_text_config.num_hidden_layers,
        "hidden_size": config.hf_text_config.hidden_size,
        "vocab_size": config.hf_text_config.vocab_size,
        "context_length": config.context_len,
        "boundaries": boundaries,
        "layers": [boundary - 1 for boundary in boundaries],
        "method": "model" if native else "layer hooks",
        "dtype": str(_dump_dtype()).removeprefix("torch."),
        "model_dtype": str(config.dtype).removeprefix("torch."),
        "device": str(model_runner.device),
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
        "attention_backend": args.attention_backend,
        "chunked_prefill_size": args.chunked_prefill_size,
        "ranks": {"tp": parallel.tp_size, "attn_tp": parallel.attn_tp_size, "writers": args.dp_size},
        "max_bytes": _recorder.staging.max_bytes,
        "pool_bytes": _recorder.staging.pool_bytes,
    }


def source_hash() -> str:
    """A hash of this package's own source: dumps of another capture are not taken for this one's."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _dump_dtype() -> torch.dtype:
    return getattr(torch, os.environ.get("SGLANG_HS_DTYPE", "bfloat16"))


def _make_recorder(model_runner: Any, boundaries: list[int], tap: BoundaryTap | None) -> Recorder:
    """Staging is shared out evenly between the groups that write; each may keep a whole pool of its share."""
    environment, num_writers = os.environ, model_runner.server_args.dp_size
    on_gpu = str(model_runner.device).startswith("cuda")
    staging = Staging(
        max_bytes=int(environment.get("SGLANG_HS_MAX_BYTES", 4 << 30)) // num_writers,
        pool_bytes=int(environment.get("SGLANG_HS_POOL_BYTES", 2 << 30)),
        pin=on_gpu,
        wait_seconds=float(environment.get("SGLANG_HS_WAIT_SECONDS", 120)),
    )
    num_threads = int(environment.get("SGLANG_HS_WRITERS", 2))
    device_id = torch.cuda.current_device() if on_gpu else None
    writer = Writer(environment["SGLANG_HS_DUMP_DIR"], staging, num_threads, device_id)
    metadata = boundaries_json(boundaries) | {
        "nonce": environment.get("SGLANG_HS_NONCE", ""),
        "final": "post-norm",
        "sglang_version": sglang_version,
        "model_class": type(model_runner.model).__name__,
    }
    num_layers = model_runner.model_config.hf_text_config.num_hidden_layers
    try:
        all_tap = BoundaryTap(model_runner.model, num_layers, list(range(num_layers + 1)))
    except UnsupportedModel as error:
        logger.warning("[HS_DUMP] no dumps of every boundary: %s", error)
        all_tap = None
    transfer = StreamTransfer(torch.device("cuda", device_id)) if on_gpu else DirectTransfer()
    return Recorder(staging, writer, len(boundaries), metadata, _dump_dtype(), tap, all_tap, transfer)
