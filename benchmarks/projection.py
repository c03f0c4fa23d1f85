"""A projection, no measurement of a draft: SGLang's speed at an 8B shape if drafts were accepted at given lengths.

    python benchmarks/projection.py --accept-lengths 2.0 3.0       # one GPU; about a minute and a half per server

The weights are random (`--load-format dummy`), for target and draft; acceptance is SGLang's own simulation
(SGLANG_SIMULATE_ACC_LEN, sglang/srt/speculative/spec_utils.py `generate_simulated_accept_index`), which accepts so
many tokens per verification whatever was drafted, the bonus token included. What remains is real: the cost of drafting
and verifying beside that of plain decoding. A tiny target's decoding is bound by the launching of kernels and says
little about that; this shape is bound by reading its weights. The longest accept length is --steps + 1.

Prints one row per accept length and concurrency; "none" is the target alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eagle3_utils.acceptance import served
from eagle3_utils.acceptance.prompt_sets import Prompt
from eagle3_utils.acceptance.tree import TreeShape
from eagle3_utils.config import EvaluateConfig
from eagle3_utils.serving.server import Server
from eagle3_utils.target import load_target

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_theta": 500000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DRAFT = LLAMA_8B | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32000,
    "num_aux_hidden_states": 3,
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 15, 28]},
}  # fmt: skip


def main() -> None:
    args = _arguments()
    if not torch.cuda.is_available():
        print("left out: SGLang's EAGLE3 needs a CUDA GPU")
        return
    shape, rows = TreeShape(args.steps), []
    with tempfile.TemporaryDirectory() as folder:
        target, draft = (_model(Path(folder, name), config) for name, config in (("8b", LLAMA_8B), ("draft", DRAFT)))
        for length in [None, *args.accept_lengths]:
            for concurrency, tokens_per_second in _serve(args, target, draft, shape, length, Path(folder)).items():
                rows.append({"simulated accept length": length, "concurrency": concurrency})
                rows[-1]["tokens/s"] = round(tokens_per_second, 1)
    alone = {row["concurrency"]: row["tokens/s"] for row in rows if row["simulated accept length"] is None}
    print("PROJECTION: random weights, simulated acceptance; no draft was trained for this")
    for row in rows:
        print(json.dumps(row | {"speed-up": round(row["tokens/s"] / alone[row["concurrency"]], 3)}))


def _serve(
    args: argparse.Namespace, target: Path, draft: Path, shape: TreeShape, length: float | None, folder: Path
) -> dict[int, float]:
    """Output tokens/s by concurrency of one server; `length` None: without a draft."""
    config = EvaluateConfig(
        device="cuda", attention_backend=args.attention_backend, startup_timeout_seconds=300.0,
        extra_server_args=args.server_args.split(),
    )  # fmt: skip
    most = str(max(args.concurrency))
    flags = ["--load-format", "dummy", "--skip-tokenizer-init", "--disable-radix-cache"]
    flags += ["--max-running-requests", most, "--cuda-graph-max-bs-decode", most]
    flags += served.speculative_flags(draft, shape) if length else []
    environment = {"SGLANG_SIMULATE_ACC_LEN": str(length)} if length else {}
    prompts = [
        Prompt(str(number), "random", torch.randint(10, 30000, (args.prompt_tokens,)).tolist())
        for number in range(args.rounds * max(args.concurrency))
    ]
    name = f"server-{length or 'alone'}"
    with Server(config, load_target(str(target)), folder / f"{name}.log", folder / name, extra_args=flags,
                environment=environment) as server:  # fmt: skip
        runs = {
            concurrency: served.measure(
                server.client, prompts[: args.rounds * concurrency], args.new_tokens, concurrency, name,
                shape if length else None, ignore_eos=True,
            )
            for concurrency in args.concurrency
        }  # fmt: skip
    for concurrency, run in runs.items():
        found = served.accept_lengths(run)[served.ALL]["counted"].value if length else 1.0
        print(f"{name}, {concurrency} in flight: {run.tokens_per_second:,.0f} tokens/s, accept length {found:.2f}")
    return {concurrency: run.tokens_per_second for concurrency, run in runs.items()}


def _model(folder: Path, config: dict) -> Path:
    """A model folder without real weights: SGLang makes them up. A folder without any file of weights is refused."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"unused": torch.zeros(1)}, folder / "model.safetensors")
    return folder


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept-lengths", type=float, nargs="+", default=[2.0, 3.0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4, help="requests per place in flight")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--attention-backend", default="triton")
    parser.add_argument("--server-args", default="--sampling-backend pytorch --grammar-backend none")
    return parser.parse_args()


if __name__ == "__main__":
    main()
