"""Make data/prompts/{chat,maths,code}.jsonl and prompts.json again.

    python data/prompts/make_prompts.py --url http://127.0.0.1:30000 --model example

`chat` is written by the example target itself (an SGLang server must be up); `maths` and `code` are generated
procedurally, maths with reasoning-gym (`pip install -e .[prompts]`; Apache-2.0). Sixty prompts per source are for
evaluation only: none of them shares a run of eight words with a training prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path

from code_tasks import code_prompts
from maths_tasks import maths_prompts

from eagle3_utils.corpus.dedupe import ngram_hashes, words_of
from eagle3_utils.corpus.generation.endpoints import EndpointPool
from eagle3_utils.corpus.generation.synthesise import PromptFilter, synthesise_prompts
from eagle3_utils.runs import write_json
from eagle3_utils.target import load_target, load_tokenizer

FOLDER = Path(__file__).resolve().parent
PER_SOURCE, EVAL_PER_SOURCE, EVAL_NGRAM, SEED = 300, 60, 8, 20


def eval_members(texts: list[str], topics: list[str], num_eval: int, seed: int) -> set[int]:
    """Which prompts are for evaluation: whole groups, linked by the same topic or a shared run of eight words."""
    group = list(range(len(texts)))

    def root(member: int) -> int:
        while group[member] != member:
            group[member] = group[group[member]]
            member = group[member]
        return member

    first_with: dict[int | str, int] = {}
    for number, (text, topic) in enumerate(zip(texts, topics, strict=True)):
        for value in (topic, *ngram_hashes(words_of(text), EVAL_NGRAM)):
            group[root(number)] = root(first_with.setdefault(value, number))
    members: dict[int, list[int]] = {}
    for number in range(len(texts)):
        members.setdefault(root(number), []).append(number)
    groups = sorted(members.values())
    random.Random(seed).shuffle(groups)
    chosen: set[int] = set()
    for linked in groups:
        if len(chosen) + len(linked) <= num_eval:
            chosen.update(linked)
    if len(chosen) != num_eval:
        raise SystemExit(f"only {len(chosen)} of {num_eval} evaluation prompts can be kept apart")
    return chosen


def write_source(source: str, texts: list[str], topics: list[str] | None = None) -> None:
    """One JSONL file: ids in order, split by `eval_members`."""
    chosen = eval_members(texts, topics or texts, EVAL_PER_SOURCE, SEED)
    with open(FOLDER / f"{source}.jsonl", "w") as file:
        for number, text in enumerate(texts):
            split = "eval" if number in chosen else "train"
            line = {"id": f"{source}-{number:04d}", "source": source, "split": split}
            file.write(json.dumps(line | {"messages": [{"role": "user", "content": text}]}, ensure_ascii=False) + "\n")


async def chat_prompts(url: str, tokenizer) -> tuple[list[str], dict]:
    """Prompts the target makes up, and the account of what was filtered out."""
    async with EndpointPool([url], timeout_seconds=1800) as pool:
        result = await synthesise_prompts(pool, tokenizer, PER_SOURCE, seed=SEED)
    return result.prompts, result.report(PromptFilter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="SGLang server of the model; without it chat.jsonl is left as it is")
    parser.add_argument("--model", default="example")
    arguments = parser.parse_args()
    about_path = FOLDER / "prompts.json"
    about = json.loads(about_path.read_text()) if about_path.is_file() else {}
    if arguments.url:
        target = load_target(arguments.model)
        texts, account = asyncio.run(chat_prompts(arguments.url, load_tokenizer(target)))
        about["chat"] = {"made_by": "self-synthesis", "model": target.path.name, "temperature": 1.0} | account
        write_source("chat", texts)
    write_source("maths", maths_prompts(PER_SOURCE, SEED))
    topics, texts = zip(*code_prompts(PER_SOURCE, SEED), strict=True)
    write_source("code", list(texts), list(topics))
    about["maths"] = {"made_by": "reasoning-gym 0.1.25 and sentence patterns (maths_tasks.py)"}
    about["code"] = {"made_by": "task × language × request patterns (code_tasks.py)"}
    about["all"] = {
        "command": "python data/prompts/make_prompts.py --url URL --model example",
        "seed": SEED,
        "per_source": PER_SOURCE,
        "evaluation_only_per_source": EVAL_PER_SOURCE,
        "kept_apart_by": f"no evaluation prompt shares {EVAL_NGRAM} words in a row with a training prompt",
    }
    write_json(about_path, about)


if __name__ == "__main__":
    main()
