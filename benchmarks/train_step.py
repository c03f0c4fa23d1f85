"""One optimiser step of draft training on random states: tokens/s and peak memory, beside SpecForge's own step.

    python benchmarks/train_step.py                                  # a small shape, CPU or GPU
    python benchmarks/train_step.py --shape llama-8b --batch 4       # on a GPU; also kimi, also --mix
    python benchmarks/train_step.py --goals --peer train_step_specforge.py --specforge DIR

The last runs ours and the peer's harness on every shape and prints one table (benchmarks/side_by_side.py). DIR is
where `pip install --no-deps --target DIR specforge==0.2.0` put the peer.

Dense (default): `--batch` documents of `--tokens` tokens, each token supervised with probability 0.7, as the peer's
harness makes them. Mix: documents of lognormal length (mean 700, at most --tokens), 55 % supervised in turns, packed
to batch × tokens. tokens/s counts real tokens once, whatever the number of unrolled steps; planning, clipping and
AdamW are inside the step. Whether a teacher's choice has a draft id is worked out at a sample's first visit only
(--first-visit: in every step). Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]
from side_by_side import compare, wait_for_turn  # noqa: E402

from eagle3_utils.config import TrainConfig  # noqa: E402
from eagle3_utils.draft.network import DraftConfig, DraftModel  # noqa: E402
from eagle3_utils.draft.training.batch_runner import BatchRunner, PlannedBatch  # noqa: E402
from eagle3_utils.draft.training.initial import draw_matrices  # noqa: E402
from eagle3_utils.draft.training.optimizer import MasterAdamW  # noqa: E402
from eagle3_utils.draft.unrolling.teacher import Teacher  # noqa: E402
from eagle3_utils.draft.vocab import vocab_map_of  # noqa: E402
from eagle3_utils.states.dataset import PackedBatch  # noqa: E402

SHAPES = {  # hidden, MLP, heads, key-value heads, head width, vocabulary, draft vocabulary, tokens per document
    "tiny": (256, 512, 4, 2, 64, 4096, 1024, 256),
    "smollm2": (576, 1536, 9, 3, 64, 49152, 8192, 512),
    "llama-8b": (4096, 14336, 32, 8, 128, 128256, 32000, 2048),
    "kimi": (7168, 18432, 64, 8, 128, 163840, 32000, 4096),
}


def main() -> None:
    args = _arguments()
    if args.goals:
        compare(args, SHAPES)
        return
    torch.manual_seed(0)
    bench = Bench(args)
    works = args.works or ["mix" if args.mix else "dense"]
    batches = {work: bench.batch(work) for work in works}
    first_step_seconds = {work: bench.steps(batch, args.warmup)[0] for work, batch in batches.items()}
    wait_for_turn(args.gate)
    for work, batch in batches.items():
        print(json.dumps(bench.measure(work, batch) | {"first_step_seconds": round(first_step_seconds[work], 1)}))


class Bench:
    """A random draft of one shape with its runner and optimiser."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        hidden, mlp, heads, kv_heads, width, vocab_size, draft_vocab, _ = SHAPES[args.shape]
        self.hidden, self.vocab_size = hidden, vocab_size
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        ids = torch.randperm(vocab_size)[:draft_vocab].sort().values
        config = DraftConfig(
            hidden_size=hidden, intermediate_size=mlp, num_heads=heads, num_kv_heads=kv_heads, head_dim=width,
            vocab_size=vocab_size, draft_vocab_size=draft_vocab, aux_layers=(1, 2, 3), max_position_embeddings=8192,
        )  # fmt: skip
        vocab = vocab_map_of(ids, vocab_size)
        with torch.device(self.device):
            embed = (torch.randn(vocab_size, hidden) * 0.02).to(self.dtype)
            self.model = DraftModel(config, vocab, embed)
            draw_matrices(self.model)
        self.model.place(self.device, self.dtype, args.frozen_on_host)
        options = TrainConfig(ttt_steps=args.ttt_steps, max_rows_at_once=args.rows)
        self.runner = BatchRunner(self.model, self._teacher(ids), options, most_frequent=0)
        self.optimizer = MasterAdamW(self.model.parameters(), max_grad_norm=0.5)

    def _teacher(self, ids: torch.Tensor) -> Teacher:
        """A random head whose rows outside the draft vocabulary are weaker, as with a real one."""
        head = torch.randn(self.vocab_size, self.hidden, device=self.device) * 3 / self.hidden**0.5
        weaker = torch.full((self.vocab_size, 1), 0.8, device=self.device)
        weaker[ids.to(self.device)] = 1.0
        plain = argparse.Namespace(logit_scale=1.0, logit_softcap=None)
        return Teacher(head.mul_(weaker).to(self.dtype), self.model.target_ids, plain, self.args.frozen_on_host)

    def batch(self, work: str) -> PlannedBatch:
        """Documents with random states, prepared as a loader's thread does, then on the device (as the peer's)."""
        batch = self.runner.prepare(make_batch(self.args, work, self.hidden, self.vocab_size, self.dtype))
        batch.packed = batch.packed.to(self.device)
        return batch

    def steps(self, batch: PlannedBatch, count: int) -> list[float]:
        """Seconds of each of some steps."""
        return [self._timed_step(batch) for _ in range(count)]

    def measure(self, work: str, batch: PlannedBatch) -> dict:
        """Median step, after `--warmup` untimed ones."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = statistics.median(self.steps(batch, self.args.steps))
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return {
            "implementation": "eagle3_utils", "shape": self.args.shape, "work": work, "tokens": batch.packed.num_tokens,
            "supervised": int(batch.packed.loss_mask.sum()), "ttt_steps": self.args.ttt_steps, "rows": self.args.rows,
            "tokens_per_second": round(batch.packed.num_tokens / seconds, 1), "step_ms": round(seconds * 1e3, 2),
            "phase_ms": self.phases(batch), "peak_gib": round(peak, 2), "device": str(self.device),
            "dtype": str(self.dtype), "torch": torch.__version__, "threads": torch.get_num_threads(),
        }  # fmt: skip

    def phases(self, batch: PlannedBatch) -> dict[str, float]:
        """Milliseconds of one step's parts, each waited for (so their sum is a little more than a step)."""
        marks = [("", self._now())]
        self._timed_step(batch, lambda name: marks.append((name, self._now())))
        return {name: round((end - start) * 1e3, 2) for (_, start), (name, end) in pairwise(marks)}

    def _timed_step(self, batch: PlannedBatch, mark=lambda name: None) -> float:
        began = self._now()
        if self.args.first_visit:
            self.runner.forget_coverage()
        self.optimizer.zero_grad()
        result = self.runner(batch)
        mark("unroll, with its backward pass")
        result.loss.backward()
        mark("backward pass of the rest")
        self.optimizer.step(1e-4, self.optimizer.grad_norm())
        mark("optimiser")
        return self._now() - began

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def make_batch(args, work: str, hidden: int, vocab_size: int, dtype: torch.dtype) -> PackedBatch:
    """Random documents with random states; only the rows a loss needs have a final state."""
    lengths, masks = _documents(args, work)
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
        sample_ids=[f"{work}{number}" for number in range(len(lengths))], sources=["random"] * len(lengths),
    )  # fmt: skip


def _documents(args, work: str) -> tuple[list[int], list[torch.Tensor]]:
    if work == "dense":
        lengths = [args.tokens] * args.batch
        return lengths, [torch.rand(length) < 0.7 for length in lengths]
    lengths, room = [], args.tokens * args.batch
    while room > 0:
        lengths.append(min(int(draw_lengths(1, args.tokens)), room))
        room -= lengths[-1]
    masks = []
    for length in lengths:  # prompt and answer, twice; 55 % of it answer
        turn = max(1, length // 2)
        masks.append((torch.arange(length) % turn) >= turn * 0.45)
    return lengths, masks


def draw_lengths(count: int, longest: int) -> torch.Tensor:
    """Lognormal lengths with mean 700 before the cut, int64 [count]."""
    spread, mean = 0.8, torch.tensor(700.0)
    drawn = (torch.randn(count) * spread + mean.log() - spread**2 / 2).exp()
    return drawn.clamp(16, longest).long()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--tokens", type=int, help="per document; default by shape")
    parser.add_argument("--batch", type=int, default=1, help="documents per step")
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--mix", action="store_true")
    parser.add_argument("--works", nargs="+", choices=("dense", "mix"), help="one after the other; default by --mix")
    parser.add_argument("--rows", type=int, default=8192, help="slots unrolled at a time (max_rows_at_once)")
    parser.add_argument("--frozen-on-host", action="store_true")
    parser.add_argument("--first-visit", action="store_true", help="work out the teacher's coverage in every step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--gate", help=argparse.SUPPRESS)
    parser.add_argument("--goals", action="store_true", help="ours and the peer on every shape, one table")
    parser.add_argument("--peer", help="SpecForge harness (a script)")
    parser.add_argument("--specforge", help="folder that holds the specforge package")
    parser.add_argument("--goal-shapes", nargs="+", default=["llama-8b", "kimi"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.tokens = args.tokens or SHAPES[args.shape][-1]
    return args


if __name__ == "__main__":
    main()
