"""Chat templates of well-known families, cut to what a plain conversation uses, and tokenizers that speak them."""

from __future__ import annotations

from copy import copy, deepcopy
from functools import cache

from transformers import AutoTokenizer

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As CHATML, with generation markers around the answer.
CHATML_MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}<|begin_of_text|>{% endif %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
DEEPSEEK_V3 = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = ns.system + m.content %}{% endif %}{% endfor %}<｜begin▁of▁sentence｜>{{ ns.system }}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% elif m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
KIMI_K2 = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_system|>system<|im_middle|>You are Kimi."
    "<|im_end|>{% endif %}{{ '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)
HARMONY = (
    "<|start|>system<|message|>You are ChatGPT.<|end|>{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if loop.last and m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
    "{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}{% if loop.last and not add_generation_prompt %}"
    "<|return|>{% else %}<|end|>{% endif %}{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# Qwen3's habit: reasoning is shown after the last user turn only, and an empty block where there is none.
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% set content = m.content %}{% set reasoning = m.reasoning_content"
    " or '' %}{% if '</think>' in content %}{% set reasoning = content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{ '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}{% endif %}{{ content }}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' + (call | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SPECIAL_TOKENS = {
    "CHATML": ["<|im_start|>", "<|im_end|>"],
    "LLAMA3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "DEEPSEEK_V3": ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"],
    "KIMI_K2": ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"],
    "HARMONY": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"],
    "QWEN3": ["<|im_start|>", "<|im_end|>"],
}

TALK = [
    {"role": "system", "content": "Answer in rhyme."},
    {"role": "user", "content": "assistant user"},  # words that stand in headers, too
    {"role": "assistant", "content": "user"},
    {"role": "user", "content": "user"},
    {"role": "assistant", "content": "Grüße, 世界! 🙂\n\nassistant"},
]


@cache
def speaking(folder, family: str, template: str | None = None):
    """The tokenizer of a folder with a family's special tokens and template (or another template)."""
    if template is not None:
        tokenizer = copy(speaking(folder, family))  # shares the vocabulary
    else:
        tokenizer = deepcopy(_plain(folder))
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS[family]})
    tokenizer.chat_template = template or globals()[family]
    return tokenizer


@cache
def _plain(folder):
    return AutoTokenizer.from_pretrained(folder)
