"""A target of Kimi-K2.5's shape with made-up weights, and long samples for it: for a rehearsal before the real run.

    python benchmarks/kimi_target.py                                              # tiny, for a CPU
    python benchmarks/kimi_target.py FOLDER --shape rehearsal --samples 48 --tokens 8192     # 28 GB, for one large GPU

MLA, mixture of experts, YaRN, hidden size, vocabulary, heads and router are Kimi-K2.5's; layers are fewer and experts
narrower. Weights are written one block of rows at a time, each shard by a thread of its own, so memory stays flat.

The target repeats its last token: the embedding dominates the residual stream, and `lm_head` is the embedding at
another scale. So its logits are as clear as a trained model's, and a draft that is served rightly is accepted, where
one for random logits would never be. Samples are runs of equal tokens; of every two thousand, the second half is
supervised. FOLDER/samples.jsonl holds them, in the format that stage 01 calls tokenized.

Prints one JSON line: bytes of weights, seconds, bytes per second.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

KIMI_K25 = {  # the text model in config.json of moonshotai/Kimi-K2.5, as far as DeepseekV3ForCausalLM reads it
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1,
    "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.827, "vocab_size": 163840, "max_position_embeddings": 262144, "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0, "rope_scaling": {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
SHAPES = {
    "rehearsal": KIMI_K25 | {"num_hidden_layers": 6, "moe_intermediate_size": 256},
    "tiny": KIMI_K25 | {
        "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "n_routed_experts": 16,
        "num_experts_per_tok": 4, "vocab_size": 4096,
    },
}  # fmt: skip
EMBEDDING_SIZE = 8.0  # root mean square of an embedding's values
LAYER_SHARE = 0.15  # what each attention and each MLP adds to the residual stream, relative to the embedding
LOGIT = 16.0  # of the last token, were nothing added to its embedding; the others have deviation LOGIT / √hidden
SILU_SIZE = 0.6  # root mean square of silu(x)·y for standard normal x, y
BLOCK_VALUES = 64 << 20  # made and written at a time
RUN_TOKENS, TURN_TOKENS, SAMPLE_IDS = 16, 1024, 32000
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Tensor:
    """One tensor of the checkpoint. `size`: deviation of its values; 0 for ones, None for zeros in float32.

    Tensors with the same `seed` hold the same numbers, but for the scale.
    """

    name: str
    shape: tuple[int, ...]
    size: float | None
    seed: str

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.size is None else torch.bfloat16

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def tensor(name: str, *shape: int, size: float | None = 0.0, seed: str | None = None) -> Tensor:
    return Tensor(name, shape, size, seed or name)


def shards(config: dict[str, Any]) -> list[list[Tensor]]:
    """The tensors of every file: embeddings, head, and one file per layer."""
    hidden, vocab_size = config["hidden_size"], config["vocab_size"]
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    files = [
        [tensor(embedding, vocab_size, hidden, size=EMBEDDING_SIZE)],
        [tensor(head, vocab_size, hidden, size=LOGIT / hidden, seed=embedding), tensor("model.norm.weight", hidden)],
    ]
    return files + [layer(config, number) for number in range(config["num_hidden_layers"])]


def layer(config: dict[str, Any], number: int) -> list[Tensor]:
    """A decoder layer: every projection keeps the size of its input, the last ones scale to `LAYER_SHARE`."""
    hidden, heads, added = config["hidden_size"], config["num_attention_heads"], LAYER_SHARE * EMBEDDING_SIZE
    q_rank, kv_rank, rope, value = (
        config[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
    )
    nope, prefix = config["qk_nope_head_dim"], f"model.layers.{number}."

    def linear(name: str, rows: int, columns: int, size: float = 1.0) -> Tensor:
        return tensor(f"{prefix}{name}.weight", rows, columns, size=size / math.sqrt(columns))

    def mlp(name: str, width: int, size: float) -> list[Tensor]:
        parts = [linear(f"{name}.{part}_proj", width, hidden) for part in ("gate", "up")]
        return [*parts, linear(f"{name}.down_proj", hidden, width, size / SILU_SIZE)]

    tensors = [
        tensor(f"{prefix}input_layernorm.weight", hidden),
        tensor(f"{prefix}post_attention_layernorm.weight", hidden),
        linear("self_attn.q_a_proj", q_rank, hidden),
        tensor(f"{prefix}self_attn.q_a_layernorm.weight", q_rank),
        linear("self_attn.q_b_proj", heads * (nope + rope), q_rank),
        linear("self_attn.kv_a_proj_with_mqa", kv_rank + rope, hidden),
        tensor(f"{prefix}self_attn.kv_a_layernorm.weight", kv_rank),
        linear("self_attn.kv_b_proj", heads * (nope + value), kv_rank),
        linear("self_attn.o_proj", hidden, heads * value, added),
    ]
    if number < config["first_k_dense_replace"]:
        return tensors + mlp("mlp", config["intermediate_size"], added)
    experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
    # The chosen experts' outputs are independent, each weighted with scaling factor / their number.
    routed = added * math.sqrt(config["num_experts_per_tok"]) / config["routed_scaling_factor"]
    tensors += [
        linear("mlp.gate", experts, hidden),
        tensor(f"{prefix}mlp.gate.e_score_correction_bias", experts, size=None),
        *mlp("mlp.shared_experts", width * config["n_shared_experts"], added),
    ]
    return tensors + [part for expert in range(experts) for part in mlp(f"mlp.experts.{expert}", width, routed)]


def blocks(spec: Tensor, device: torch.device):
    """A tensor's values, a block of rows at a time."""
    rows, row_values = spec.shape[0], math.prod(spec.shape[1:])
    step = max(1, BLOCK_VALUES // row_values)
    for start in range(0, rows, step):
        shape = (min(step, rows - start), *spec.shape[1:])
        if not spec.size:
            yield torch.full(shape, 0.0 if spec.size is None else 1.0, dtype=spec.dtype)
            continue
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{spec.seed}:{start}".encode()))
        values = torch.randn(shape, generator=generator, device=device, dtype=spec.dtype)
        yield values.mul_(spec.size).cpu()


def write_shard(path: Path, tensors: list[Tensor], device: torch.device) -> int:
    """Write one safetensors file (header length, header, values); returns its bytes of values."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    names = {torch.bfloat16: "BF16", torch.float32: "F32"}
    for spec in tensors:
        place = [offset, offset := offset + spec.num_bytes]
        header[spec.name] = {"dtype": names[spec.dtype], "shape": list(spec.shape), "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for spec in tensors:
            for block in blocks(spec, device):
                file.write(block.view(torch.uint8).numpy().data)
    return offset


def write_weights(config: dict[str, Any], folder: Path, device: torch.device, workers: int) -> int:
    """Write all shards and their index; returns the bytes of values."""
    files = shards(config)
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    with ThreadPoolExecutor(workers) as pool:
        sizes = list(pool.map(lambda name, tensors: write_shard(folder / name, tensors, device), names, files))
    weight_map = {spec.name: name for name, tensors in zip(names, files, strict=True) for spec in tensors}
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(sizes)


def write_config(config: dict[str, Any], folder: Path) -> None:
    """config.json as DeepSeek-V3 checkpoints have it; the last two ids of the vocabulary are the special tokens."""
    end = config["vocab_size"] - 1
    fixed = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "ep_size": 1,
        "bos_token_id": end - 1, "eos_token_id": end,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fixed | config, indent=2))


def write_tokenizer(vocab_size: int, folder: Path) -> None:
    """One token per byte, and names for all other ids that no text gives, so that every id can be shown."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = letters + [f"<{number}>" for number in range(len(letters), vocab_size - len(SPECIAL_TOKENS))]
    vocabulary = {name: number for number, name in enumerate([*names, *SPECIAL_TOKENS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKENS])
    end = SPECIAL_TOKENS[-1]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL_TOKENS[0], eos_token=end, pad_token=end,
        clean_up_tokenization_spaces=False, chat_template=CHAT_TEMPLATE,
    )  # fmt: skip
    fast.save_pretrained(folder)


def write_samples(config: dict[str, Any], folder: Path, num_samples: int, num_tokens: int) -> None:
    """Samples of `num_tokens` tokens: runs of equal ids, turns by turns unsupervised and supervised."""
    chooser, most = random.Random(0), min(SAMPLE_IDS, config["vocab_size"] - len(SPECIAL_TOKENS))
    turn = min(TURN_TOKENS, num_tokens // 4)
    mask = [position // turn % 2 for position in range(num_tokens)]
    with open(folder / "samples.jsonl", "w") as file:
        for number in range(num_samples):
            runs = [chooser.randrange(most) for _ in range(-(-num_tokens // RUN_TOKENS))]
            ids = [token for token in runs for _ in range(RUN_TOKENS)][:num_tokens]
            file.write(json.dumps({"id": f"long-{number:04d}", "input_ids": ids, "loss_mask": mask}) + "\n")


def make(folder: Path, config: dict[str, Any], num_samples: int, num_tokens: int, device: str, workers: int) -> int:
    """Make the target and its samples in `folder`; returns the bytes of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(config["vocab_size"], folder)
    write_samples(config, folder, num_samples, num_tokens)
    num_bytes = write_weights(config, folder, torch.device(device), workers)
    write_config(config, folder)  # last: with it the folder is a checkpoint
    return num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("outputs/models/kimi-tiny"))
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--layers", type=int, help="instead of the shape's")
    parser.add_argument("--expert-width", type=int, help="instead of the shape's; Kimi-K2.5 has 2048")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128, help="of each sample")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    config, started = dict(SHAPES[arguments.shape]), time.perf_counter()
    for key, value in (("num_hidden_layers", arguments.layers), ("moe_intermediate_size", arguments.expert_width)):
        config |= {key: value} if value else {}
    num_bytes = make(arguments.folder, config, arguments.samples, arguments.tokens, arguments.device, arguments.workers)
    seconds = time.perf_counter() - started
    measured = {"weight_bytes": num_bytes, "seconds": round(seconds, 1), "bytes_per_second": round(num_bytes / seconds)}
    print(json.dumps({"folder": str(arguments.folder)} | measured))


if __name__ == "__main__":
    main()
