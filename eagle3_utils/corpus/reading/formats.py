"""The shapes chat data comes in, brought to one: an `Item` of messages, of raw text, or of token ids.

| format | keys |
|---|---|
| tokenized | `input_ids`, `loss_mask` |
| response | `messages` (the prompt), `text`, and where known `prompt_ids`, `output_ids`: a line of responses.jsonl |
| messages | `messages`: [{`role`, `content`, …}], optional `tools`: OpenAI's |
| sharegpt | `conversations`: [{`from`, `value`}], optional `system` |
| alpaca | `instruction`, `output`, optional `input`, `system` |
| prompt_response | a pair such as `prompt` + `response` |
| text | `text`: every token is supervised |
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

Format = Literal["tokenized", "response", "messages", "sharegpt", "alpaca", "prompt_response", "text"]
_PAIRS = [
    (prompt, response)
    for prompt in ("prompt", "question", "query", "input")
    for response in ("response", "completion", "answer", "output")
]
_ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("developer",), "developer"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}
_KEPT_MESSAGE_KEYS = ("tool_calls", "tool_call_id", "name")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


class Unusable(Exception):
    """An input record that cannot become a training record; the message is the reason, to be counted."""


@dataclass
class Item:
    """One input record in the common shape: `messages`, or `text`, or `input_ids` + `loss_mask`."""

    format: Format
    id: str | None = None
    source: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None
    answer_start: int = 0  # of a response: where its last answer begins in input_ids
    finish_reason: str | None = None  # of a response
    num_generated: int = 0  # of a response: tokens as the API counted them, where it did


def detect_format(record: dict[str, Any]) -> Format:
    """Which format a record has, by its keys.

    Raises
    ------
    Unusable
        When it has the keys of none.
    """
    keys = record.keys()
    if "input_ids" in keys and "loss_mask" in keys:
        return "tokenized"
    if "messages" in keys:
        return "response" if "text" in keys and "finish_reason" in keys else "messages"
    if "conversations" in keys or "conversation" in keys:
        return "sharegpt"
    if "instruction" in keys and "output" in keys:
        return "alpaca"
    if any(prompt in keys and response in keys for prompt, response in _PAIRS):
        return "prompt_response"
    if "text" in keys:
        return "text"
    raise Unusable("unknown format")


def to_item(record: dict[str, Any], format: Format, answered: bool = True) -> Item:
    """Bring a record of a known format into the common shape; a prompt need not be `answered`.

    Raises
    ------
    Unusable
        With the reason: an empty conversation, an unknown role, an image part, …
    """
    item = _CONVERTERS[format](record)
    name = record.get("id", record.get("uuid"))
    item.id = str(name) if isinstance(name, str | int) and str(name) else None
    if format in ("response", "tokenized") and isinstance(record.get("source"), str):
        item.source = record["source"] or None
    if answered and format not in ("tokenized", "text"):
        _check_conversation(item.messages)
    return item


def text_of(item: Item) -> str:
    """All words of a conversation or text, for the search for duplicates."""
    if item.text is not None:
        return item.text
    return "\n".join(f"{m.get('reasoning_content', '')}{m['content']}" for m in item.messages if m["role"] != "system")


def _from_tokenized(record: dict[str, Any]) -> Item:
    ids, mask = record["input_ids"], record["loss_mask"]
    if not _all_integers(ids) or not _all_integers(mask):
        raise Unusable("input_ids or loss_mask is not a list of integers")
    return Item("tokenized", input_ids=list(ids), loss_mask=[int(value) for value in mask])


def _from_response(record: dict[str, Any]) -> Item:
    if not isinstance(record["text"], str):
        raise Unusable("the response is not text")
    answer = {"role": "assistant", "content": record["text"]}
    answer |= {key: record[key] for key in ("reasoning_content", "tool_calls") if record.get(key)}
    if not isinstance(record["messages"], list):
        raise Unusable("messages is not a list")
    item = Item("response", messages=_messages([*record["messages"], answer]), tools=_tools(record))
    item.finish_reason, count = record.get("finish_reason"), record.get("completion_tokens")
    item.num_generated = count if isinstance(count, int) else 0
    prompt, output = record.get("prompt_ids"), record.get("output_ids")
    if prompt is None or output is None:
        return item
    if not _all_integers(prompt) or not _all_integers(output) or not output:
        raise Unusable("prompt_ids or output_ids is not a list of token ids")
    item.input_ids, item.answer_start = [*prompt, *output], len(prompt)
    item.loss_mask = [0] * len(prompt) + [1] * len(output)
    for span in record.get("output_spans") or []:  # earlier turns of a replayed conversation
        if not _all_integers(span) or len(span) != 2 or not 0 <= span[0] <= span[1] <= len(prompt):
            raise Unusable("output_spans do not lie in the prompt")
        item.loss_mask[span[0] : span[1]] = [1] * (span[1] - span[0])
    return item


def _from_messages(record: dict[str, Any]) -> Item:
    return Item("messages", messages=_messages(record["messages"]), tools=_tools(record))


def _from_sharegpt(record: dict[str, Any]) -> Item:
    turns = record.get("conversations", record.get("conversation"))
    if not isinstance(turns, list):
        raise Unusable("conversations is not a list")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise Unusable("a turn is not an object")
        messages.append({"role": turn.get("from", turn.get("role")), "content": turn.get("value", turn.get("content"))})
    if record.get("system"):
        messages.insert(0, {"role": "system", "content": record["system"]})
    return Item("sharegpt", messages=_messages(messages), tools=_tools(record))


def _from_alpaca(record: dict[str, Any]) -> Item:
    task, more = record["instruction"], record.get("input") or ""
    if not isinstance(task, str) or not isinstance(more, str):
        raise Unusable("instruction or input is not text")
    user = f"{task}\n\n{more}" if more else task
    messages = [{"role": "user", "content": user}, {"role": "assistant", "content": record["output"]}]
    if record.get("system"):
        messages.insert(0, {"role": "system", "content": record["system"]})
    return Item("alpaca", messages=_messages(messages))


def _from_prompt_response(record: dict[str, Any]) -> Item:
    pair = next((pair for pair in _PAIRS if pair[0] in record and pair[1] in record), None)
    if pair is None:
        raise Unusable("no pair of prompt and response")
    prompt, response = record[pair[0]], record[pair[1]]
    messages = list(prompt) if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    messages += list(response) if isinstance(response, list) else [{"role": "assistant", "content": response}]
    return Item("prompt_response", messages=_messages(messages))


def _from_text(record: dict[str, Any]) -> Item:
    if not isinstance(record["text"], str) or not record["text"].strip():
        raise Unusable("no text")
    return Item("text", text=record["text"])


_CONVERTERS = {
    "tokenized": _from_tokenized,
    "response": _from_response,
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "alpaca": _from_alpaca,
    "prompt_response": _from_prompt_response,
    "text": _from_text,
}


def _messages(raw: Any) -> list[dict[str, Any]]:
    if not isinstance(raw, list):
        raise Unusable("messages is not a list")
    messages = []
    for message in raw:
        if not isinstance(message, dict):
            raise Unusable("a message is not an object")
        role = message.get("role")
        if not isinstance(role, str) or role.lower() not in _ROLES:
            raise Unusable(f"unknown role: {str(role)[:40]}")
        kept = {key: message[key] for key in _KEPT_MESSAGE_KEYS if message.get(key)}
        reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key)), None)
        if reasoning is not None:
            kept["reasoning_content"] = reasoning
        if not isinstance(reasoning, str | None) or not isinstance(kept.get("tool_calls", []), list):
            raise Unusable("a message's reasoning or tool_calls is of the wrong type")
        if "tool_calls" in kept:
            kept["tool_calls"] = [_call(call) for call in kept["tool_calls"]]
        messages.append({"role": _ROLES[role.lower()], "content": _content(message.get("content"), kept)} | kept)
    return messages


def _call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object: templates write JSON themselves, and SGLang parses them, too."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise Unusable("a tool call is not an object")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError:
            raise Unusable("the arguments of a tool call are not JSON") from None
    if not isinstance(arguments, dict):
        raise Unusable("the arguments of a tool call are not an object")
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def _content(content: Any, kept: dict[str, Any]) -> str:
    if isinstance(content, str):
        return content
    if content is None and "tool_calls" in kept:
        return ""
    if not isinstance(content, list):
        raise Unusable("a message's content is not text")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else "text" if isinstance(part, str) else None
        if kind != "text":
            raise Unusable(f"a part that is not text: {str(kind)[:40]}")
        parts.append(part if isinstance(part, str) else part.get("text", ""))
    if not all(isinstance(part, str) for part in parts):
        raise Unusable("a message's content is not text")
    return "".join(parts)


def _tools(record: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = record.get("tools")
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise Unusable("tools is not a list")
    return tools or None


def _check_conversation(messages: list[dict[str, Any]]) -> None:
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise Unusable("no assistant turn")
    if any(not message["content"].strip() and "tool_calls" not in message for message in answers):
        raise Unusable("an empty assistant turn")


def _all_integers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) in (int, bool) for value in values)
