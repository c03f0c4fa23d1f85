"""One optimiser step of draft training on random states: tokens/s and peak memory, beside SpecForge's own step.

    python benchmarks/train_step.py                                  # a small shape, CPU or GPU
    python benchmarks/train_step.py --shape llama-8b --batch 4       # on a GPU; also kimi
    python benchmarks/train_step.py --shape llama-8b --mix           # lognormal lengths, 55 % supervised in turns
    python benchmarks/train_step.py --shape llama-8b --peer train_step_specforge.py

Dense (default): `--batch` documents of `--tokens` tokens, each token supervised with probability 0.7, as the peer's
harness makes them. Mix: documents of lognormal length (mean 700, at most --tokens) packed to batch × tokens; a peer
pads them, so its real tokens/s are its dense rate times mean length / tokens.
tokens/s counts real tokens once, whatever the number of unrolled steps; planning, clipping and AdamW on float32
masters are inside the step. Prints one JSON line per implementation.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch

from eagle3_utils.config import TrainConfig
from eagle3_utils.draft.network import DraftConfig, DraftModel
from eagle3_utils.draft.training.batch_runner import BatchRunner
from eagle3_utils.draft.training.optimizer import MasterAdamW
from eagle3_utils.draft.unrolling.teacher import Teacher
from eagle3_utils.draft.vocab import vocab_map_of
from eagle3_utils.states.dataset import PackedBatch

SHAPES = {  # hidden, MLP, heads, key-value heads, head width, vocabulary, draft vocabulary, tokens per document
    "tiny": (256, 512, 4, 2, 64, 4096, 1024, 256),
    "smollm2": (576, 1536, 9, 3, 64, 49152, 8192, 512),
    "llama-8b": (4096, 14336, 32, 8, 128, 128256, 32000, 2048),
    "kimi": (7168, 18432, 64, 8, 128, 163840, 32000, 4096),
}


def main() -> None:
    args = _arguments()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    print(json.dumps(measure_ours(args, device, dtype)))
    if args.peer:
        print(json.dumps({"peer": run_peer(args)}))


def measure_ours(args, device: torch.device, dtype: torch.dtype) -> dict:
    """Median step over `--steps` timed ones, after `--warmup`."""
    hidden, mlp, heads, kv_heads, width, vocab_size, draft_vocab, _ = SHAPES[args.shape]
    ids = torch.randperm(vocab_size)[:draft_vocab].sort().values
    config = DraftConfig(hidden_size=hidden, intermediate_size=mlp, num_heads=heads, num_kv_heads=kv_heads,
                         head_dim=width, vocab_size=vocab_size, draft_vocab_size=draft_vocab, aux_layers=(1, 2, 3),
                         max_position_embeddings=8192)  # fmt: skip
    embed = (torch.randn(vocab_size, hidden, device=device) * 0.02).to(dtype)
    head = torch.randn(vocab_size, hidden, device=device) * 3 / hidden**0.5
    mask = torch.ones(vocab_size, 1, device=device)
    mask[ids] = 1 / 0.8
    head = (head * mask * 0.8).to(dtype)  # rows outside the draft vocabulary are weaker, as with a real one
    with torch.device(device):
        model = DraftModel(config, vocab_map_of(ids, vocab_size), embed)
    model = model.place(device, dtype)
    runner = BatchRunner(
        model, Teacher(head, model.target_ids, _PLAIN_LOGITS), TrainConfig(ttt_steps=args.ttt_steps), most_frequent=0
    )
    optimizer = MasterAdamW(model.parameters(), max_grad_norm=0.5)
    batch = make_batch(args, hidden, vocab_size, dtype).to(device)
    cpu_side = {name: getattr(batch, name).cpu() for name in ("loss_mask", "cu_seqlens", "final_index")}
    for name, tensor in cpu_side.items():
        setattr(batch, name, tensor)
    times = [_timed_step(runner, optimizer, batch, device) for _ in range(args.warmup + args.steps)]
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    median = statistics.median(times[args.warmup :])
    return {
        "implementation": "eagle3_utils", "shape": args.shape, "work": "mix" if args.mix else "dense",
        "tokens": batch.num_tokens, "supervised": int(batch.loss_mask.sum()), "ttt_steps": args.ttt_steps,
        "tokens_per_second": round(batch.num_tokens / median, 1), "step_ms": round(median * 1e3, 2),
        "first_step_seconds": round(times[0], 1), "peak_gib": round(peak, 2), "device": str(device),
        "dtype": str(dtype), "torch": torch.__version__, "threads": torch.get_num_threads(),
    }  # fmt: skip


class _PLAIN_LOGITS:
    logit_scale, logit_softcap = 1.0, None


def make_batch(args, hidden: int, vocab_size: int, dtype: torch.dtype) -> PackedBatch:
    """Random documents with random states; only the rows a loss needs have a final state."""
    lengths, masks = _documents(args)
    total = sum(lengths)
    mask = torch.cat(masks)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    needed = torch.zeros(total, dtype=torch.bool)
    needed[:-1] = mask[1:] & (documents[1:] == documents[:-1])
    return PackedBatch(
        input_ids=torch.randint(1, vocab_size, (total,)), loss_mask=mask,
        position_ids=torch.cat([torch.arange(length) for length in lengths]), document_ids=documents,
        cu_seqlens=cu_seqlens, aux=torch.randn(total, 3, hidden).to(dtype),
        final=torch.randn(int(needed.sum()), hidden).to(dtype),
        final_index=torch.where(needed, needed.cumsum(0) - 1, -1),
        sample_ids=[f"s{number}" for number in range(len(lengths))], sources=["random"] * len(lengths),
    )  # fmt: skip


def _documents(args) -> tuple[list[int], list[torch.Tensor]]:
    if not args.mix:
        lengths = [args.tokens] * args.batch
        return lengths, [torch.rand(length) < 0.7 for length in lengths]
    lengths, room = [], args.tokens * args.batch
    spread, mean = 0.8, 700.0
    while room > 0:
        drawn = torch.randn(1).mul(spread).add(torch.tensor(mean).log() - spread**2 / 2).exp()
        lengths.append(min(max(16, int(drawn)), args.tokens, room))
        room -= lengths[-1]
    masks = []
    for length in lengths:  # prompt and answer, twice; 55 % of it answer
        turn = max(1, length // 2)
        masks.append((torch.arange(length) % turn) >= turn * 0.45)
    return lengths, masks


def _timed_step(runner, optimizer, batch, device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    optimizer.zero_grad()
    runner(batch, runner.plan(batch)).loss.backward()
    optimizer.step(1e-4, optimizer.grad_norm())
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def run_peer(args) -> dict:
    """SpecForge's step on the same dense shape, by its harness (a script of flags; its last line is JSON)."""
    hidden, mlp, heads, kv_heads, width, vocab_size, draft_vocab, _ = SHAPES[args.shape]
    flags = {"hidden": hidden, "intermediate": mlp, "heads": heads, "kv-heads": kv_heads, "head-dim": width,
             "vocab": vocab_size, "draft-vocab": draft_vocab, "seq": args.tokens, "batch": args.batch,
             "ttt": args.ttt_steps, "steps": args.steps, "warmup": args.warmup}  # fmt: skip
    command = [
        sys.executable,
        args.peer,
        *(str(part) for name, value in flags.items() for part in (f"--{name}", value)),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return {name: result[name] for name in ("tokens_per_s", "step_ms", "peak_mem_MiB", "phase_ms_median")}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--tokens", type=int, help="per document; default by shape")
    parser.add_argument("--batch", type=int, default=1, help="documents per step")
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--mix", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--peer", help="SpecForge harness to run on the same shape")
    args = parser.parse_args()
    args.tokens = args.tokens or SHAPES[args.shape][-1]
    return args


if __name__ == "__main__":
    main()
