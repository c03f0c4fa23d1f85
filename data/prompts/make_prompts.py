"""Make data/prompts/{chat,maths,code}.jsonl and prompts.json again; or any number of further training prompts.

    python data/prompts/make_prompts.py --url http://127.0.0.1:30000 --model example
    python data/prompts/make_prompts.py --out outputs/prompts --count 7000 --url http://127.0.0.1:30000 --concurrent 256

`chat` is written by the example target itself (an SGLang server must be up); `maths` and `code` are generated
procedurally, maths with reasoning-gym (`pip install -e .[prompts]`; Apache-2.0). Sixty prompts per source are for
evaluation only: none of them shares a run of eight words with a training prompt. Nor with the further prompts of
`--out`, which differ from all prompts here and from each other; their code tasks come from code_grammar.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from itertools import islice
from pathlib import Path
from time import perf_counter

from code_grammar import code_tasks
from code_tasks import code_prompts
from maths_tasks import maths_prompts

from eagle3_utils.corpus.dedupe import exact_key, ngram_hashes, words_of
from eagle3_utils.corpus.generation.endpoints import EndpointPool
from eagle3_utils.corpus.generation.responses import read_prompts
from eagle3_utils.corpus.generation.synthesise import PromptFilter, synthesise_prompts
from eagle3_utils.corpus.merge import read_evaluation
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


async def chat_prompts(
    urls: list[str], tokenizer, num: int, seed: int, concurrent: int, usable=lambda text: True
) -> tuple[list[str], dict]:
    """Prompts the target makes up, and the account of what was filtered out."""
    async with EndpointPool(urls, timeout_seconds=1800, max_connections=concurrent) as pool:
        options = {"seed": seed, "num_concurrent": concurrent, "usable": usable}
        result = await synthesise_prompts(pool, tokenizer, num, **options)
    return result.prompts, result.report(PromptFilter())


def remake(arguments: argparse.Namespace) -> None:
    """The files of this folder and their description."""
    about_path = FOLDER / "prompts.json"
    about = json.loads(about_path.read_text()) if about_path.is_file() else {}
    if arguments.url:
        target = load_target(arguments.model)
        tokenizer = load_tokenizer(target)
        texts, account = asyncio.run(chat_prompts(arguments.url, tokenizer, PER_SOURCE, SEED, arguments.concurrent))
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


class Apart:
    """Says yes to a text that is new, and shares no eight words in a row with an evaluation prompt of this folder."""

    def __init__(self):
        files = sorted(FOLDER.glob("*.jsonl"))
        self._evaluation = read_evaluation(files, EVAL_NGRAM)
        self._seen = {exact_key(prompt["messages"][-1]["content"]) for prompt in read_prompts(files, split=None)}

    def __call__(self, text: str) -> bool:
        key = exact_key(text)
        if key in self._seen or self._evaluation.leak([text]) is not None:
            return False
        self._seen.add(key)
        return True


def make_more(arguments: argparse.Namespace) -> None:
    """Training prompts in another folder, any number, apart from this folder's evaluation prompts."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    apart, num, seed = Apart(), arguments.count, arguments.seed
    for source in arguments.sources:
        start = perf_counter()
        if source == "maths":
            texts = maths_prompts(num, seed, apart)
        elif source == "code":
            texts = list(islice((text for _, text in code_tasks(seed) if apart(text)), num))
        else:
            tokenizer = load_tokenizer(load_target(arguments.model))
            texts, _ = asyncio.run(chat_prompts(arguments.url, tokenizer, num, seed, arguments.concurrent, apart))
        with open(arguments.out / f"{source}.jsonl", "w") as file:
            for number, text in enumerate(texts):
                line = {"id": f"{source}-{seed}-{number:06d}", "source": source, "split": "train"}
                line["messages"] = [{"role": "user", "content": text}]
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        print(f"{source}: {len(texts)} prompts in {perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", nargs="+", help="SGLang servers of the model; without one no chat prompts are made")
    parser.add_argument("--model", default="example")
    parser.add_argument("--concurrent", type=int, default=32, help="requests in flight")
    parser.add_argument("--out", type=Path, help="another folder, for training prompts only")
    parser.add_argument("--count", type=int, default=7000, help="with --out: prompts per source")
    parser.add_argument("--sources", nargs="+", default=["chat", "maths", "code"], choices=["chat", "maths", "code"])
    parser.add_argument("--seed", type=int, default=SEED + 1, help="with --out; part of the ids")
    arguments = parser.parse_args()
    if arguments.out is None:
        remake(arguments)
        return
    if "chat" in arguments.sources and not arguments.url:
        parser.error("chat prompts need --url, or leave them out: --sources maths code")
    make_more(arguments)


if __name__ == "__main__":
    main()
