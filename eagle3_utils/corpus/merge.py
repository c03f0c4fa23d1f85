"""Many sources → one corpus: take in, weigh, shuffle, split, count, write.

    report = merge(specs, config, tokenizer, vocab_size, folder)
    # folder: train.parquet, val.parquet, corpus.json, rejected.jsonl

Memory is flat in the size of the corpus but for an index of about 100 bytes a record (and about 5 kB more when near
duplicates are searched). The order of the records and the split depend on the seed and the records' names only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from eagle3_utils.config import MergeConfig
from eagle3_utils.corpus.dedupe import Decontaminator
from eagle3_utils.corpus.reading.formats import Unusable, to_item
from eagle3_utils.corpus.reading.intake import DUPLICATES, Intake, SourceCount
from eagle3_utils.corpus.reading.sources import SourceSpec, read_whole
from eagle3_utils.corpus.records import CorpusDigest, ParquetRecords
from eagle3_utils.corpus.spool import RecordSpool
from eagle3_utils.corpus.statistics import SPLITS, CorpusStatistics
from eagle3_utils.errors import UserError
from eagle3_utils.runs import config_values, hash_json, write_json

# columns with a prompt: a text, a list of texts, or turns; looked for in this order
_PROMPTS = ("messages", "conversations", "prompt", "question", "problem", "turns", "instruction", "query", "text")


@dataclass
class MergeReport:
    """What a merge made: the contents of `corpus.json`, and the statistics behind it for plots."""

    corpus: dict[str, Any]
    statistics: CorpusStatistics
    sources: list[SourceCount]


def merge(
    specs: list[SourceSpec],
    config: MergeConfig,
    tokenizer,
    vocab_size: int,
    folder: Path,
    *,
    evaluation_files: list[Path] = (),
    log: Callable[[str], None] = print,
) -> MergeReport:
    """Build the corpus in `folder`.

    Parameters
    ----------
    vocab_size : ids from here on are refused.
    evaluation_files : prompts that must not be trained on, as JSONL; lines whose `split` is "train" do not count.

    Raises
    ------
    UserError
        When a source is more broken than `max_rejected_fraction`, breaks off, has an absurd supervised share, or is
        empty; when fewer than two records are left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        (folder / f"{split}.parquet").unlink(missing_ok=True)
    (folder / "corpus.json").unlink(missing_ok=True)
    evaluation = read_evaluation(evaluation_files, config.decontaminate_ngram)
    if evaluation_files:
        log(f"kept apart from {evaluation.num_texts} evaluation prompts")
    intake = Intake(config, tokenizer, vocab_size, evaluation)
    with RecordSpool(folder / "spool.tmp", config.seed) as spool:
        with open(folder / "rejected.jsonl", "w") as rejected:
            for number, spec in enumerate(specs):
                for record in intake.take(spec, rejected, log):
                    spool.append(record, number)
                log(describe(intake.counts[-1]))
        for count in intake.counts:
            check_rejections(count, config.max_rejected_fraction, folder / "rejected.jsonl")
        chosen = spool.choose([(spec.weight, spec.max_samples) for spec in specs])
        if len(chosen) < 2:
            what = f"{len(chosen)} of {len(spool)} records are left; it takes one to train and one to validate"
            raise UserError(what, "sources", "add records, or raise weight and max_samples", exit_code=2)
        statistics = CorpusStatistics(vocab_size)
        digests = {}
        train, val = spool.split(chosen, config.val_fraction)
        train = spool.repeat(train, [spec.weight for spec in specs])
        for split, numbers in zip(SPLITS, (train, val), strict=True):
            digests[split] = _write_split(spool, numbers, split, folder, statistics)
    check_supervised_share(statistics, config, text_sources={spec.name for spec in specs if spec.format == "text"})
    corpus = _describe_corpus(config, statistics, digests, intake, tokenizer)
    corpus["evaluation_prompts"] = evaluation.num_texts
    write_json(folder / "corpus.json", corpus)
    return MergeReport(corpus, statistics, intake.counts)


def read_evaluation(files: list[Path], ngram: int) -> Decontaminator:
    """The evaluation prompts of these files, as n-grams.

    A line has its prompt in one of the columns `messages`, `prompt`, `question`, …; those whose `split` is "train" do
    not count. Raises `UserError` for a line without a prompt, and for a file without a line that counts.
    """
    decontaminator = Decontaminator(ngram)
    for path in files:
        if not path.is_file():
            raise UserError("no such file", f"decontaminate_with: {path}", exit_code=2)
        before = decontaminator.num_texts
        for raw in read_whole(path):
            where = f"{raw.file}:{raw.line}"
            if raw.value.get("split") == "train":
                continue
            texts = _prompt_texts(raw.value, where)
            for text in texts:
                decontaminator.add(str(raw.value.get("id", where)), text)
        if decontaminator.num_texts == before:
            raise UserError("no evaluation prompt in it", f"decontaminate_with: {path}", exit_code=2)
    return decontaminator


def _prompt_texts(record: dict[str, Any], where: str) -> list[str]:
    prompt = next((record[column] for column in _PROMPTS if record.get(column)), None)
    turns = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, list) else []
    if turns and all(isinstance(turn, str) for turn in turns):
        return turns
    turns = [
        turn | {"role": turn.get("role", turn.get("from")), "content": turn.get("content", turn.get("value"))}
        for turn in turns
        if isinstance(turn, dict)
    ]
    try:  # the answer makes a whole conversation of it
        messages = to_item({"messages": [*turns, {"role": "assistant", "content": "-"}]}, "messages").messages
    except Unusable as unusable:
        raise UserError(str(unusable), where) from None
    texts = [message["content"] for message in messages if message["role"] == "user"]
    if not texts:
        raise UserError(f"no prompt in it; looked for in {', '.join(_PROMPTS)}", where, exit_code=2)
    return texts


def describe(count: SourceCount) -> str:
    """One line about what became of a source."""
    reasons = ", ".join(f"{number} {reason}" for reason, number in (count.unusable + count.dropped).most_common())
    cut = f", {count.truncated} cut to max_seq_len" if count.truncated else ""
    return f"source {count.name}: {count.taken} of {count.read} taken{cut}" + (f" ({reasons})" if reasons else "")


def check_rejections(count: SourceCount, max_fraction: float, rejected: Path) -> None:
    """Stop when a source is empty or too much of it is unusable."""
    if not count.taken:
        raise UserError(f"nothing of its {count.read} records can be used", f"sources: {count.name}", f"see {rejected}")
    unusable = count.unusable.total()
    if unusable > max_fraction * count.read:
        worst, times = count.unusable.most_common(1)[0]
        raise UserError(
            f"{unusable} of {count.read} records are unusable, most ({times}) because of: {worst}",
            f"sources: {count.name}",
            f"see {rejected}, or raise max_rejected_fraction ({max_fraction})",
        )


def check_supervised_share(statistics: CorpusStatistics, config: MergeConfig, text_sources: set[str]) -> None:
    """Stop when a source's masks are all ones, all zeros or of an absurd share (raw text may be all ones)."""
    low, high = config.supervised_share_bounds
    for source in statistics.sources:
        share = statistics.supervised(source).sum() / statistics.lengths(source).sum()
        if share < low or (share > high and source not in text_sources):
            raise UserError(
                f"{share:.1%} of its tokens are supervised, outside {low:.0%} to {high:.0%}",
                f"source {source}",
                "look at its samples in notebooks/01_merge_data.ipynb, or widen supervised_share_bounds",
            )


def _write_split(
    spool: RecordSpool, numbers: np.ndarray, split: str, folder: Path, statistics: CorpusStatistics
) -> str:
    digest = CorpusDigest()
    with ParquetRecords(folder / f"{split}.parquet") as out:
        for record in spool.records(numbers):
            out.write(record)
            digest.update(record)
            statistics.add(record, split)
    return digest.hexdigest()


def _describe_corpus(
    config: MergeConfig, statistics: CorpusStatistics, digests: dict[str, str], intake: Intake, tokenizer
) -> dict[str, Any]:
    identity = {"splits": digests, "tokenizer_hash": tokenizer_hash(tokenizer)}
    return {
        "hash": hash_json(identity),
        **identity,
        "template_hash": xxhash.xxh3_128_hexdigest(str(tokenizer.chat_template).encode()),
        "counts": statistics.split_counts(),
        "max_seq_len": config.max_seq_len,
        "longest": int(statistics.lengths().max()),
        "statistics": statistics.table(),
        "duplicates": {kind: sum(count.dropped[kind] for count in intake.counts) for kind in DUPLICATES},
        "draft_vocab_coverage": statistics.coverage(),
        "draft_vocab_coverage_held_out": statistics.coverage("val"),
        "draft_vocab_coverage_by_source": statistics.coverage_by_source("val"),
        "most_frequent_tokens": statistics.most_frequent_tokens(tokenizer),
        "sources": [count.to_json() for count in intake.counts],
        "settings": config_values(config),
    }


def tokenizer_hash(tokenizer) -> str:
    """xxh3-128 of all that decides how text becomes ids."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return xxhash.xxh3_128_hexdigest(backend.to_str().encode())
    return hash_json([sorted(tokenizer.get_vocab().items()), sorted(map(str, tokenizer.all_special_tokens))])
