"""A tiny random DeepSeek-V3 (MLA, mixture of experts, YaRN), and a test-only plugin that lets SGLang serve it on a CPU.

Out of the box `torch_native` sends prefill down the multi-head path, whose head size it does not accept; the plugin
registers a handler that always takes the absorbed path. It also calls the model the way Kimi-K2.5 does, through its
embeddings: the language model, and so the logits processor, is not told the token ids.
"""

from __future__ import annotations

import json
from pathlib import Path


def register() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    AttentionBackendRegistry.register("torch_native", lambda _attention, _batch: AttnForwardMethod.MLA)
    HookRegistry.register("sglang.srt.models.deepseek_v2.DeepseekV2ForCausalLM.forward", by_embeddings, HookType.AROUND)


def by_embeddings(original, self, input_ids, positions, forward_batch, *args, **kwargs):
    """As `general_mm_embed_routine` (sglang/srt/managers/mm_utils.py) calls a language model."""
    return original(self, None, positions, forward_batch, input_embeds=self.model.embed_tokens(input_ids))


def install(folder: Path) -> str:
    """Metadata that makes SGLang find this plugin; returns the PYTHONPATH that does it."""
    info = folder / "deepseek_on_cpu-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepseek_on_cpu\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\ndeepseek_on_cpu = deepseek_on_cpu:register\n")
    return f"{folder}:{Path(__file__).parent}"


def make_tiny_deepseek(folder: Path, tokenizer_folder: Path) -> Path:
    """Six layers, hidden size 128, four heads, eight routed experts of which two answer, one shared; bf16."""
    import torch
    from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = DeepseekV3Config(
        hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
        n_group=2, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True,
        q_lora_rank=64, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        vocab_size=len(tokenizer), max_position_embeddings=4096, tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 1024,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        bos_token_id=1, eos_token_id=tokenizer.eos_token_id, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Keys of the published DeepSeek-V3 config that SGLang reads and transformers leaves out.
    published = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1}
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | published))
    return folder
