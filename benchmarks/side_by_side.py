"""Ours and a peer's training step beside each other: every process compiles at once, then each is timed alone.

A process makes its model, runs its warm-up steps (compilation, most of the time), says that it is ready by a file and
waits; when all are ready or dead, they are let through one by one. So the comparison takes little longer than its
slowest compilation, and nothing else runs while a step is timed. One process that fails costs its own row only.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

_READY_SECONDS, _TURN_SECONDS = 170, 60
PLAN = {  # shape -> documents per step of the peer and of ours, our variants with their flags
    "llama-8b": (4, {"ours": ["--works", "dense", "mix"]}),
    "kimi": (1, {"ours": ["--rows", "1536", "--frozen-on-host"], "lean": ["--rows", "1024", "--frozen-on-host"]}),
    "tiny": (2, {"ours": ["--works", "dense", "mix"], "lean": ["--rows", "100", "--frozen-on-host"]}),
}


def wait_for_turn(gate: str | None) -> None:
    """Say that the warm-up is over and wait until the others let this process through. gate: a path, or None."""
    if gate is None:
        return
    Path(f"{gate}.ready").touch()
    while not Path(f"{gate}.go").exists():
        time.sleep(0.02)


def compare(args, shapes: dict[str, tuple]) -> None:
    """Run everything and print one JSON line per result and a table of ratios; exits with 1 when something failed."""
    with tempfile.TemporaryDirectory() as folder:
        runs = _start_all(args, shapes, Path(folder))
        results = []
        for name, (process, gate) in runs.items():
            found = _let_through(name, process, gate)
            results += found
            for result in found:
                print(json.dumps(result), flush=True)
    _print_table(args, results)
    if failed := [result for result in results if "error" in result]:
        sys.exit("\n".join(f"{result['run']} failed: {_last_line(result['error'])}" for result in failed))


def _start_all(args, shapes, folder: Path) -> dict[str, tuple[subprocess.Popen, Path]]:
    runs = {}
    for shape in args.goal_shapes:
        batch, variants = PLAN[shape]
        common = [str(part) for part in ("--steps", args.steps, "--warmup", args.warmup)]
        for variant, flags in variants.items():
            script = str(Path(__file__).with_name("train_step.py"))
            ours = [sys.executable, script, "--shape", shape, "--batch", str(batch), *flags, *common]
            ours += ["--ttt-steps", str(args.ttt_steps)]
            runs[f"{variant} {shape}"] = _start(ours, folder / f"{variant}-{shape}", {})
        if args.peer:
            command = [sys.executable, __file__, args.peer, *_peer_flags(shapes[shape], batch, args), *common]
            paths = [args.specforge, os.environ.get("PYTHONPATH")]
            extra = {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}
            runs[f"peer {shape}"] = _start(command, folder / f"peer-{shape}", extra)
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if all(process.poll() is not None or Path(f"{gate}.ready").exists() for process, gate in runs.values()):
            break
        time.sleep(0.2)
    return runs


def _peer_flags(shape: tuple, batch: int, args) -> list[str]:
    hidden, mlp, heads, kv_heads, width, vocab_size, draft_vocab, tokens = shape
    flags = {"hidden": hidden, "intermediate": mlp, "heads": heads, "kv-heads": kv_heads, "head-dim": width,
             "vocab": vocab_size, "draft-vocab": draft_vocab, "seq": tokens, "batch": batch,
             "ttt": args.ttt_steps}  # fmt: skip
    return [str(part) for name, value in flags.items() for part in (f"--{name}", value)]


def _start(command: list[str], gate: Path, extra: dict[str, str]) -> tuple[subprocess.Popen, Path]:
    environment = os.environ | extra | {"GATE": str(gate)}
    if "train_step.py" in command[1]:
        command = [*command, "--gate", str(gate)]
    with open(f"{gate}.out", "w") as out, open(f"{gate}.err", "w") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, env=environment), gate


def _let_through(name: str, process: subprocess.Popen, gate: Path) -> list[dict]:
    """Results of one process, timed while the others wait; if it failed or has none, an `error` with its last words."""
    Path(f"{gate}.go").touch()
    try:
        process.wait(_TURN_SECONDS if Path(f"{gate}.ready").exists() else 1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    found = []
    for line in Path(f"{gate}.out").read_text().splitlines():
        if line.startswith("{"):
            found.append({"run": name} | _same_names(json.loads(line)))
    if process.returncode or not found:
        found.append({"run": name, "error": Path(f"{gate}.err").read_text()[-1500:], "exit_code": process.returncode})
    return found


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def _same_names(result: dict) -> dict:
    """A peer's line in our words."""
    if "peer" not in result:
        return result
    return {"implementation": result["peer"], "work": "dense", "tokens_per_second": result["tokens_per_s"],
            "step_ms": result["step_ms"]["median"], "phase_ms": result["phase_ms_median"],
            "peak_gib": round(result["peak_mem_MiB"] / 1024, 2)}  # fmt: skip


def _print_table(args, results: list[dict]) -> None:
    by_run = {(result["run"], result.get("work")): result for result in results}
    titles = ("ours tok/s", "GiB", "peer tok/s", "GiB", "speed", "memory")
    widths = (11, 6, 11, 6, 6, 7)
    print(f"{'shape':14} {'work':6}", *(f"{title:>{width}}" for title, width in zip(titles, widths, strict=True)))
    for shape in args.goal_shapes:
        batch, variants = PLAN[shape]
        peer = by_run.get((f"peer {shape}", "dense"))
        for variant, work in ((variant, work) for variant in variants for work in ("dense", "mix")):
            ours = by_run.get((f"{variant} {shape}", work))
            if ours is None:
                continue
            line = f"{variant + ' ' + shape:14} {work:6} {ours['tokens_per_second']:11,.0f} {ours['peak_gib']:6.1f}"
            if peer:
                rate = peer["tokens_per_second"] * (1.0 if work == "dense" else padded_share(batch))
                speed, memory = ours["tokens_per_second"] / rate, ours["peak_gib"] / peer["peak_gib"]
                line += f" {rate:11,.0f} {peer['peak_gib']:6.1f} {speed:5.2f}x {memory:6.2f}x"
            print(line)
    print("mix, peer: its dense rate times the share of real tokens in batches padded to their longest document")


def padded_share(batch: int) -> float:
    """Real tokens over all tokens when `batch` documents of the mix are padded to the longest of them."""
    from train_step import draw_lengths

    torch.manual_seed(0)
    lengths = draw_lengths(20_000 * batch, 2048).view(-1, batch)
    return float(lengths.sum() / (lengths.amax(1).sum() * batch))


def run_peer() -> None:
    """The peer's harness in this process, with a wait between its warm-up and its timed steps."""
    harness = Path(sys.argv[1]).resolve()
    sys.path.insert(0, str(harness.parent))
    import peer_common

    timed = peer_common.run_steps

    def run_steps(args, step, timer):
        for number in range(args.warmup):
            step(number)
        wait_for_turn(os.environ["GATE"])
        args.warmup = 1
        return timed(args, step, timer)

    peer_common.run_steps = run_steps
    sys.argv = [str(harness), *sys.argv[2:]]
    runpy.run_path(str(harness), run_name="__main__")


if __name__ == "__main__":
    run_peer()
