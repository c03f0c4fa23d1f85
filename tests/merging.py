"""Small sources and the corpus built from them."""

from __future__ import annotations

import json
import random

from eagle3_utils.config import MergeConfig
from eagle3_utils.corpus.merge import merge
from eagle3_utils.corpus.reading.sources import parse_sources

NOUNS = ("apple", "river", "engine", "garden", "violin", "planet", "market", "winter", "coffee", "bridge", "letter")


def question(seed: int) -> str:
    return " ".join(random.Random(seed).choices(NOUNS, k=14)) + f" {seed}?"


def pair(seed: int, **more) -> dict:
    answer = " ".join(random.Random(-seed - 1).choices(NOUNS, k=30))
    return {"prompt": question(seed), "response": f"{answer}."} | more


def write(path, rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def build(folder, tokenizer, entries, evaluation=(), log=lambda line: None, **settings):
    specs = parse_sources(entries, folder)
    settings = MergeConfig(**{"max_seq_len": 256, "val_fraction": 0.2} | settings)
    return merge(specs, settings, tokenizer, len(tokenizer), folder / "corpus", evaluation_files=evaluation, log=log)
