"""How fast chats become masked token ids, beside the tokenizer alone on the same text.

    python benchmarks/data.py
    python benchmarks/data.py --records 1000000      # all of stage 01, and the memory it takes

The bare rate is `tokenizers`' own `encode_batch` on the rendered text, and in a second row tiktoken's `encode`, for
tokenizers without offsets: what rendering, finding the spans and making the masks cost comes on top. Conversations are
made up from the repository's prompts, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Any

import psutil
from tiktoken import Encoding
from transformers.convert_slow_tokenizer import bytes_to_unicode

from eagle3_utils.config import MergeConfig
from eagle3_utils.corpus.generation.responses import read_prompts
from eagle3_utils.corpus.merge import merge
from eagle3_utils.corpus.reading.chat import ChatRenderer
from eagle3_utils.corpus.reading.sources import parse_sources
from eagle3_utils.corpus.reading.tokens import SpanTokenizer
from eagle3_utils.runs import resolve_path
from eagle3_utils.target import load_target, load_tokenizer

NUM_CONVERSATIONS, BATCH, REPEATS = 2000, 512, 9


def conversations() -> list[list[dict[str, str]]]:
    """Chats of one to four turns, of about 700 tokens."""
    prompts = read_prompts([resolve_path(f"data/prompts/{source}.jsonl") for source in ("maths", "code")], split=None)
    texts = [prompt["messages"][0]["content"] for prompt in prompts]
    chooser = random.Random(0)
    chats = []
    for _ in range(NUM_CONVERSATIONS):
        turns = []
        for _ in range(chooser.randint(1, 4)):
            turns.append({"role": "user", "content": chooser.choice(texts)})
            turns.append({"role": "assistant", "content": "\n\n".join(chooser.choices(texts, k=8))})
        chats.append(turns)
    return chats


def in_turns(*works) -> list[list[float]]:
    """Seconds of each work in each of some rounds, so that a busy machine is busy for all alike."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(REPEATS):
        for mine, work in zip(times, works, strict=True):
            start = perf_counter()
            work()
            mine.append(perf_counter() - start)
    return times


def masking(without_offsets: bool = False) -> dict[str, float]:
    """Rendering, tokenising and masking beside the tokenizer alone on the same text."""
    tokenizer = load_tokenizer(load_target("example"))
    slow = TiktokenKind(tokenizer) if without_offsets else None
    chats = conversations()
    texts = [ChatRenderer(tokenizer).render(chat)[0] for chat in chats]
    batches = [slice(start, start + BATCH) for start in range(0, len(chats), BATCH)]
    counts: list[int] = []

    def bare() -> None:
        if slow is not None:
            counts[:] = [len(slow.encode(text)) for text in texts]
            return
        counts[:] = [len(e.ids) for b in batches for e in tokenizer.backend_tokenizer.encode_batch(texts[b])]

    def masked() -> None:
        renderer, encoder = ChatRenderer(tokenizer), SpanTokenizer(slow or tokenizer)
        for batch in batches:
            rendered = [renderer.render(chat) for chat in chats[batch]]
            encoder.encode_batch([text for text, _ in rendered], [spans for _, spans in rendered])

    bare_seconds, masked_seconds = in_turns(bare, masked)
    shares = sorted(alone / ours for alone, ours in zip(bare_seconds, masked_seconds, strict=True))
    tokens = sum(counts)
    return {
        "tokenizer": "of the tiktoken kind" if without_offsets else "with offsets",
        "conversations": len(chats),
        "tokens": tokens,
        "bare_tokens_per_second": round(tokens / median(bare_seconds)),
        "render_and_mask_tokens_per_second": round(tokens / median(masked_seconds)),
        "share_of_bare": round(median(shares), 3),
        "shares_by_round": [round(share, 3) for share in shares],
    }


class TiktokenKind:
    """A tokenizer without offsets, as Kimi's is: tiktoken's own encoder with the vocabulary of another tokenizer."""

    is_fast = False

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self._special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
        byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        ranks = {bytes(map(byte_of.get, t)): i for t, i in tokenizer.get_vocab().items() if t not in self._special}
        pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        self._encoding = Encoding("example", pat_str=pattern, mergeable_ranks=ranks, special_tokens=self._special)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")


def write_chats(path: Path, num: int) -> None:
    """`num` short chats of random words, no two alike."""
    chooser = random.Random(0)
    words = sorted({word for chat in conversations() for turn in chat for word in turn["content"].split()})
    with open(path, "w") as file:
        for number in range(num):
            user, assistant = (" ".join(chooser.choices(words, k=k)) for k in (8, 24))
            turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
            file.write(json.dumps({"id": f"r{number}", "messages": turns}) + "\n")


def merging(num: int, dedupe: str) -> dict[str, Any]:
    """All of stage 01 on `num` records, and the memory it holds at each quarter of its time."""
    tokenizer, process, held, done = load_tokenizer(load_target("example")), psutil.Process(), [], Event()

    def watch() -> None:
        while not done.wait(0.5):
            held.append(process.memory_info().rss >> 20)

    with tempfile.TemporaryDirectory() as folder:
        write_chats(Path(folder) / "chats.jsonl", num)
        specs = parse_sources([{"name": "chats", "path": f"{folder}/chats.jsonl"}], Path(folder))
        watcher, start = Thread(target=watch), perf_counter()
        watcher.start()
        settings = MergeConfig(max_seq_len=1024, dedupe=dedupe)
        report = merge(specs, settings, tokenizer, len(tokenizer), Path(folder) / "corpus", log=str)
        seconds = perf_counter() - start
        done.set()
        watcher.join()
    return {
        "records": num,
        "taken": report.sources[0].taken,
        "tokens": report.corpus["statistics"][-1]["tokens"],
        "dedupe": dedupe,
        "seconds": round(seconds, 1),
        "records_per_second": round(num / seconds),
        "held_mib_by_quarter_of_the_time": [held[len(held) * quarter // 4] for quarter in range(4)] + held[-1:],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, help="measure all of stage 01 on so many records instead")
    parser.add_argument("--dedupe", choices=["none", "exact", "near"], default="near")
    arguments = parser.parse_args()
    if arguments.records:
        print(json.dumps(merging(arguments.records, arguments.dedupe)))
        return
    for without_offsets in (False, True):
        print(json.dumps(masking(without_offsets)))


if __name__ == "__main__":
    main()
