"""Prompts and the responses already there: reading them, going on with a file, taking over earlier ones.

A response is a line of responses.jsonl: the prompt's fields + `text`, `finish_reason` and, where the API returns token
ids, `prompt_ids` and `output_ids` (with the stop token, if it was generated). `output_spans` says where the earlier
assistant turns of a conversation stand in the prompt's ids, `unasked_turns` how many turns at its end were never asked
(older lines do not say it). `responses.json` beside it says how they were drawn.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from eagle3_utils.corpus.generation.endpoints import Sampling
from eagle3_utils.corpus.reading.sources import read_file, read_whole
from eagle3_utils.errors import UserError
from eagle3_utils.runs import write_json, write_text

Prompt = dict[str, Any]
Response = dict[str, Any]


@dataclass(frozen=True)
class GenerateSettings:
    """How responses are drawn, and by whom; kept beside them in `responses.json`."""

    model_fingerprint: str
    sampling: Sampling
    seed: int = 0
    max_prompt_tokens: int | None = None
    api: str = "sglang"
    api_model: str | None = None
    extra_body: dict[str, Any] | None = None

    def identity(self) -> dict[str, Any]:
        """JSON that must agree before lines are added to an existing file."""
        return json.loads(json.dumps(asdict(self)))


def read_prompts(files: Iterable[Path], split: str | None = "train") -> list[Prompt]:
    """The prompts of JSONL files, in order; only those of `split` where a prompt names one.

    A prompt that names no source has its file's stem as its source.
    Raises `UserError` for a missing file, a broken line, a prompt without id or user turn, or an id used twice.
    """
    prompts: dict[str, Prompt] = {}
    for path in files:
        if not path.is_file():
            raise UserError("no such prompt file", str(path), exit_code=2)
        for raw in read_whole(path):
            prompt, where = {"source": path.stem} | raw.value, f"{raw.file}:{raw.line}"
            messages = prompt.get("messages")
            if not isinstance(prompt.get("id"), str) or not isinstance(messages, list) or not messages:
                raise UserError("a prompt needs an `id` and `messages`", where)
            if split is not None and prompt.get("split", split) != split:
                continue
            if prompt["id"] in prompts:
                raise UserError(f"the id {prompt['id']!r} is used twice", where)
            prompts[prompt["id"]] = prompt
    return list(prompts.values())


def read_responses(path: Path) -> dict[str, Response]:
    """The finished lines of a responses file (plain or compressed), by id; a broken last line is left out."""
    responses, broken = {}, None
    for raw in read_file(path):
        if broken is not None:
            raise UserError(broken.problem or "not a response", f"{broken.file}:{broken.line}")
        if raw.problem or "id" not in raw.value or "text" not in raw.value:
            broken = raw  # forgiven only if nothing follows
        else:
            responses[raw.value["id"]] = raw.value
    return responses


def resume(path: Path, settings: GenerateSettings) -> dict[str, Response]:
    """Open a responses file for more lines, as `open_for_more`; what is there."""
    open_for_more(path, settings.identity())
    return read_responses(path)


def drop_stale(path: Path, done: dict[str, Response], prompts: Iterable[Prompt]) -> Counter:
    """Take out of a responses file, and of `done`, every line that answers no prompt as it is now.

    Parameters
    ----------
    done : what the file holds, from `resume`.
    prompts : all that are to be answered, self-made ones too.

    Returns
    -------
    How many lines were taken out, by reason. They go to a file of the same name in the folder `dropped` beside it, so
    that `{data}/*.jsonl` as a source leaves them out; `earlier_responses` can name it.
    """
    wanted, stale = {prompt["id"]: prompt for prompt in prompts}, {}
    for name, response in done.items():
        if name not in wanted:
            stale[name] = "prompt removed or held out"
        elif not answers(response, wanted[name]):
            stale[name] = "prompt changed"
    if stale:
        aside = path.parent / "dropped" / path.name
        before = aside.read_text() if aside.is_file() else ""
        write_text(aside, before + _lines(done.pop(name) for name in stale))
        shutil.copyfile(path.with_suffix(".json"), aside.with_suffix(".json"))
        write_text(path, _lines(done.values()))
    return Counter(stale.values())


def open_for_more(path: Path, identity: dict[str, Any]) -> None:
    """Make a JSON Lines file ready for more lines: it is there, a half-written last line is cut off.

    Raises
    ------
    UserError
        When its lines were drawn otherwise (by another model, say) than the JSON `identity`, which is kept beside it.
    """
    about = path.with_suffix(".json")
    if path.is_file() and path.stat().st_size and about.is_file():
        had = json.loads(about.read_text())
        for key, value in identity.items():
            if had.get(key) != value:
                what = f"its lines were made with {key} = {had.get(key)!r}, now it is {value!r}"
                raise UserError(what, str(path), "delete the file to generate anew, or use another run_dir")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(about, identity)
    path.touch()
    with open(path, "rb+") as file:
        file.truncate(_end_of_last_line(file))


def take_earlier(
    path: Path, earlier: Iterable[Path], prompts: Iterable[Prompt], done: dict[str, Response], fingerprint: str
) -> set[str]:
    """Copy responses that the same model gave earlier to the same prompts into a responses file.

    Parameters
    ----------
    earlier : files such as data/responses/*.jsonl.zst, each with a JSON beside it that names its model.
    done : what the responses file holds; the copies are added to it.

    Returns
    -------
    The ids of all earlier responses in the file, copied now or before.

    Raises
    ------
    UserError
        When a file was made by another model: training would mix two targets.
    """
    wanted, taken = {prompt["id"]: prompt for prompt in prompts}, set()
    with open(path, "a") as out:
        for file in earlier:
            _check_same_model(file, fingerprint)
            for name, response in read_responses(file).items():
                if name in done:
                    taken |= {name} if done[name]["text"] == response["text"] else set()
                elif name in wanted and answers(response, wanted[name]):
                    out.write(_lines([response]))
                    done[name] = response
                    taken.add(name)
    return taken


def _check_same_model(file: Path, fingerprint: str) -> None:
    about = file.with_name(file.name.split(".jsonl")[0] + ".json")
    if not file.is_file() or not about.is_file():
        raise UserError("no such responses, or no JSON beside them", str(file), exit_code=2)
    made_by = json.loads(about.read_text())["model_fingerprint"]
    if made_by != fingerprint:
        what = f"made by the model {made_by[:12]}, the target is {fingerprint[:12]}"
        raise UserError(what, str(file), "set earlier_responses: []", exit_code=2)


def answers(response: Response, prompt: Prompt) -> bool:
    """Whether a response belongs to a prompt as it is now, not only to its id: the same turns, the same tools.

    Of a line that does not say how many turns were left unasked, the turns it has must be the prompt's first.
    """
    asked, turns = (
        [message for message in side["messages"] if message["role"] != "assistant"] for side in (response, prompt)
    )
    num_asked = len(turns) - response["unasked_turns"] if "unasked_turns" in response else len(asked)
    return asked == turns[:num_asked] and response.get("tools") == prompt.get("tools")


def in_turns_by_source(prompts: Iterable[Prompt], limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts, taken from every source in turn, so that a limit leaves no source out."""
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.get("source", ""), []).append(prompt)
    mixed = [prompt for row in zip_longest(*by_source.values()) for prompt in row if prompt is not None]
    return mixed[:limit]


def _lines(responses: Iterable[Response]) -> str:
    return "".join(json.dumps(response, ensure_ascii=False) + "\n" for response in responses)


def _end_of_last_line(file) -> int:
    """The offset after the last newline of a binary file."""
    position = file.seek(0, 2)
    while position > 0:
        start = max(0, position - (1 << 16))
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0
