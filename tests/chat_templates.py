"""Chat templates that do what those of well-known families do, in other words, and tokenizers that speak them."""

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
# Qwen3: tools in the system turn, reasoning after the last question only, an empty block in the last answer.
QWEN3 = r"""
{%- set opening = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if tools -%}
{{- '<|im_start|>system\n' + (opening + '\n\n' if opening else '') + 'Functions:' -}}
{%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}{{- '<|im_end|>\n' -}}
{%- elif opening -%}{{- '<|im_start|>system\n' + opening + '<|im_end|>\n' -}}{%- endif -%}
{%- set ns = namespace(asked=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' and not m.content.startswith('<tool_response>') -%}
{%- set ns.asked = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- elif m.role == 'assistant' -%}
{%- set words, thought = m.content, m.reasoning_content or '' -%}
{%- if m.reasoning_content is not string and '</think>' in words -%}
{%- set thought, words = words.split('</think>')[0].split('<think>')[-1], words.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.asked and (loop.last or thought) -%}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + words.lstrip('\n') -}}
{%- else -%}{{- words -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}{%- set called = call.function or call -%}
{{- '\n' if words or not loop.first -}}{{- '<tool_call>\n{"name": "' + called.name + '", "arguments": ' -}}
{{- called.arguments if called.arguments is string else called.arguments | tojson -}}{{- '}\n</tool_call>' -}}
{%- endfor -%}{{- '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}{%- endif -%}
"""
# Its thinking models: the prompt itself opens the reasoning.
QWEN3_THINKING = QWEN3.replace(
    r"{%- if enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}", r"{{- '<think>\n' -}}"
)
# Llama 3.1: a system turn with dates in any case, tools in the first question, one call a turn, results as JSON.
LLAMA3 = r"""
{%- set opening, rest = '', messages -%}
{%- if messages[0].role == 'system' -%}{%- set opening, rest = messages[0].content | trim, messages[1:] -%}{%- endif -%}
<|begin_of_text|>
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + ('Environment: ipython\n' if tools else '') -}}
{{- 'Knowledge ends: 2023\nToday: ' + strftime_now('%d %b %Y') + '\n\n' + opening + '<|eot_id|>' -}}
{%- for m in rest -%}
{%- if m.tool_calls -%}
{%- if m.tool_calls | length != 1 -%}{{- raise_exception('one tool call at a time') -}}{%- endif -%}
{%- set called = m.tool_calls[0].function -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + called.name + '", "parameters": ' -}}
{{- called.arguments | tojson -}}{{- '}<|eot_id|>' -}}
{%- elif m.role == 'tool' -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' -}}
{%- if loop.first and tools -%}{{- 'You may call:\n' -}}
{%- for tool in tools -%}{{- tool | tojson(indent=4) -}}{{- '\n\n' -}}{%- endfor -%}{%- endif -%}
{{- m.content | trim + '<|eot_id|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}
"""
# DeepSeek-V3: system turns joined at the start, arguments as text, no header for the answer after a tool's result.
DEEPSEEK_V3 = r"""
{%- set ns = namespace(opening='', after_tool=false) -%}
{%- for m in messages -%}{%- if m.role == 'system' -%}
{%- set ns.opening = ns.opening + ('\n\n' if ns.opening else '') + m.content -%}{%- endif -%}{%- endfor -%}
{{- '<｜begin▁of▁sentence｜>' + ns.opening -}}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.after_tool = false -%}{{- '<｜User｜>' + m.content -}}
{%- elif m.role == 'assistant' -%}
{{- '<｜tool▁outputs▁end｜>' if ns.after_tool else '<｜Assistant｜>' -}}{%- set ns.after_tool = false -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' -}}
{{- '<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + call.function.name + '\n```json\n' -}}
{{- call.function.arguments + '\n```<｜tool▁call▁end｜>' -}}{{- '<｜tool▁calls▁end｜>' if loop.last -}}
{%- endfor -%}{{- '<｜end▁of▁sentence｜>' -}}
{%- elif m.role == 'tool' -%}
{{- '' if ns.after_tool else '<｜tool▁outputs▁begin｜>' -}}{%- set ns.after_tool = true -%}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' -}}
{%- endif -%}{%- endfor -%}
{%- if ns.after_tool -%}{{- '<｜tool▁outputs▁end｜>' -}}
{%- elif add_generation_prompt -%}{{- '<｜Assistant｜>' -}}{%- endif -%}
"""
# DeepSeek-R1: the prompt opens the reasoning, and no answer is ever shown with its own.
DEEPSEEK_R1 = DEEPSEEK_V3.replace("{{- '<｜Assistant｜>' -}}", "{{- '<｜Assistant｜><think>\\n' -}}").replace(
    "{{- m.content -}}", "{{- m.content.split('</think>')[-1] -}}"
)
# Kimi-K2.5: the prompt opens the reasoning; up to the last answer without tool calls every turn has an empty block.
KIMI_K25 = r"""
{%- if tools -%}{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' -}}{%- endif -%}
{%- if messages[0].role != 'system' -%}{{- '<|im_system|>system<|im_middle|>You are Kimi.<|im_end|>' -}}{%- endif -%}
{%- set ns = namespace(answered=-1) -%}
{%- for m in messages -%}{%- if m.role == 'assistant' and not m.tool_calls -%}
{%- set ns.answered = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_' + (m.role if m.role in ('user', 'assistant') else 'system') + '|>' + (m.name or m.role) -}}
{{- '<|im_middle|>' -}}
{%- if m.role == 'assistant' -%}
{{- '<think>' + (m.reasoning_content or '' if loop.index0 > ns.answered else '') + '</think>' -}}{{- m.content -}}
{%- if m.tool_calls -%}{{- '<|tool_calls_section_begin|>' -}}
{%- for call in m.tool_calls -%}{%- set given = call.function.arguments -%}
{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' -}}
{{- given if given is string else given | tojson -}}{{- '<|tool_call_end|>' -}}
{%- endfor -%}{{- '<|tool_calls_section_end|>' -}}{%- endif -%}
{%- elif m.role == 'tool' -%}{{- '## Return of ' + m.tool_call_id + '\n' + m.content -}}
{%- else -%}{{- m.content -}}{%- endif -%}{{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_assistant|>assistant<|im_middle|><think>' -}}{%- endif -%}
"""
# Kimi-K2-Instruct: the same without reasoning.
KIMI_K2 = KIMI_K25.replace("<|im_middle|><think>", "<|im_middle|>").replace(
    "{{- '<think>' + (m.reasoning_content or '' if loop.index0 > ns.answered else '') + '</think>' -}}", ""
)
# gpt-oss: a system turn of the template's own with a date, the user's as a developer turn; channels; reasoning under
# `thinking`, with the last answer or while tools are at work; results of tools only after a call.
HARMONY = r"""
{{- '<|start|>system<|message|>You are ChatGPT.\nDate: ' + strftime_now('%Y-%m-%d') + '<|end|>' -}}
{%- set opening, rest = '', messages -%}
{%- if messages[0].role in ('system', 'developer') -%}
{%- set opening, rest = messages[0].content, messages[1:] -%}{%- endif -%}
{%- if opening or tools -%}{{- '<|start|>developer<|message|>' -}}
{{- '# Instructions\n\n' + opening + '\n\n' if opening -}}{{- '# Tools\n\n' + (tools | tojson) if tools -}}
{{- '<|end|>' -}}{%- endif -%}
{%- set ns = namespace(called=none, answered=-1) -%}
{%- for m in rest -%}{%- if m.role == 'assistant' and 'tool_calls' not in m -%}
{%- set ns.answered = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in rest -%}
{%- if m.role == 'assistant' and 'tool_calls' in m -%}
{%- if m.content and m.thinking -%}{{- raise_exception('content or thinking, not both') -}}{%- endif -%}
{%- if (m.content or m.thinking) and loop.index0 > ns.answered -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' -}}{%- endif -%}
{%- set ns.called = m.tool_calls[0].function.name -%}
{{- '<|start|>assistant to=functions.' + ns.called + '<|channel|>commentary json<|message|>' -}}
{{- m.tool_calls[0].function.arguments | tojson -}}{{- '<|call|>' -}}
{%- elif m.role == 'assistant' -%}
{%- if '<|channel|>' in m.content -%}{{- raise_exception('no channels in the content') -}}{%- endif -%}
{%- set ns.called = none -%}
{%- if loop.last and not add_generation_prompt and m.thinking -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content -}}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}
{%- elif m.role == 'tool' -%}
{%- if ns.called is none -%}{{- raise_exception('a result without a call') -}}{%- endif -%}
{{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' + (m.content | tojson) -}}
{{- '<|end|>' -}}
{%- else -%}{{- '<|start|>user<|message|>' + m.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""

_DEEPSEEK = (
    "begin▁of▁sentence User Assistant end▁of▁sentence tool▁calls▁begin tool▁call▁begin tool▁sep tool▁call▁end "
    "tool▁calls▁end tool▁outputs▁begin tool▁output▁begin tool▁output▁end tool▁outputs▁end"
)
_KIMI = (
    "im_system im_user im_assistant im_middle im_end tool_calls_section_begin tool_calls_section_end "
    "tool_call_begin tool_call_argument_begin tool_call_end"
)
SPECIAL_TOKENS = {
    "CHATML": ["<|im_start|>", "<|im_end|>"],
    "LLAMA3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "DEEPSEEK_V3": [f"<｜{name}｜>" for name in _DEEPSEEK.split()],
    "KIMI_K2": [f"<|{name}|>" for name in _KIMI.split()],
    "HARMONY": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"],
    "QWEN3": ["<|im_start|>", "<|im_end|>"],
}
SPECIAL_TOKENS |= {"QWEN3_THINKING": SPECIAL_TOKENS["QWEN3"], "DEEPSEEK_R1": SPECIAL_TOKENS["DEEPSEEK_V3"]}
SPECIAL_TOKENS["KIMI_K25"] = SPECIAL_TOKENS["KIMI_K2"]

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
