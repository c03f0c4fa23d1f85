"""One source → records: read, convert, mask, truncate, and refuse what is broken, repeated or leaked.

Every input record ends in one of three ways: taken, refused as unusable (counted against a limit), or dropped on
purpose (a duplicate, a leak from the evaluation prompts, a filter). The last two go to `rejected.jsonl` with file,
line and reason.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

from eagle3_utils.config import MergeConfig
from eagle3_utils.corpus.dedupe import Decontaminator, NearDuplicates, text_key
from eagle3_utils.corpus.reading.chat import ChatRenderer
from eagle3_utils.corpus.reading.formats import Format, Item, Unusable, detect_format, text_of, to_item
from eagle3_utils.corpus.reading.sources import RawRecord, SourceSpec, check_label, file_labels, read_source
from eagle3_utils.corpus.reading.tokens import RoundTrip, SpanTokenizer
from eagle3_utils.corpus.records import Record, problem_with

_CHUNK, _CHUNK_BYTES = 512, 8 << 20  # records, and bytes of them, from which no more are tokenised together
_ROUND_TRIPS = 1000  # records per source whose generated ids are compared with rebuilt ones

DUPLICATES = ("exact duplicate", "near duplicate", "evaluation prompt")  # reasons for which copies are dropped
Encoded = tuple[list[int], list[int]]  # input_ids [T], loss_mask [T]


class _Drop(Exception):
    """A record left out on purpose; the message is the reason."""


@dataclass
class SourceCount:
    """What became of one source's records."""

    name: str
    format: Format | None = None
    detected: bool = False
    read: int = 0
    taken: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    straddling_tokens: int = 0
    unusable: Counter = field(default_factory=Counter)
    dropped: Counter = field(default_factory=Counter)
    round_trip: Counter = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        """The counts as plain values."""
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}


class Intake:
    """Takes sources one after the other; what one source brought counts as seen for the next."""

    def __init__(self, config: MergeConfig, tokenizer, vocab_size: int, decontaminator: Decontaminator | None = None):
        self.config, self.tokenizer, self.vocab_size = config, tokenizer, vocab_size
        self.renderer = ChatRenderer(tokenizer, config.supervise, config.reasoning)
        self.counts: list[SourceCount] = []
        self._decontaminator = decontaminator
        self._near = NearDuplicates(config.near_threshold) if config.dedupe == "near" else None
        self._texts: dict[int, None] = {}
        self._ids: set[str] = set()

    def take(self, spec: SourceSpec, rejected: TextIO, log: Callable[[str], None] = print) -> Iterator[Record]:
        """The records of one source; what is not taken goes to the open file `rejected` as a JSON line."""
        count = SourceCount(spec.name, spec.format)
        self.counts.append(count)
        encoder, round_trip = SpanTokenizer(self.tokenizer), RoundTrip(self.tokenizer)
        labels = file_labels(spec)

        def reject(raw: RawRecord, reason: str, kind: str) -> None:
            (count.unusable if kind == "unusable" else count.dropped)[reason.split(":")[0]] += 1
            line = {"file": raw.file, "line": raw.line, "source": spec.name, "kind": kind, "reason": reason}
            rejected.write(json.dumps(line, ensure_ascii=False) + "\n")

        for chunk in _chunks(read_source(spec)):
            count.read += len(chunk)
            items = []
            for raw in chunk:
                try:
                    items.append((raw, self._item(raw, spec, count, log)))
                except _Drop as dropped:
                    reject(raw, str(dropped), "dropped")
                except Unusable as unusable:
                    reject(raw, str(unusable), "unusable")
            for raw, item, encoded in self._encode(items, encoder, round_trip):
                try:
                    record, num_cut = self._record(item, encoded)
                    self._refuse_copies(f"{raw.file}:{raw.line}", item)
                except _Drop as dropped:
                    reject(raw, str(dropped), "dropped")
                except Unusable as unusable:
                    reject(raw, str(unusable), "unusable")
                else:
                    file = f"{labels[raw.file]}-" if labels else ""
                    record.id = self._unique_id(record.id or f"{spec.name}-{file}{raw.line:07d}", spec.name, raw.line)
                    record.source = record.source or spec.name
                    count.taken += 1
                    count.truncated += num_cut > 0
                    count.truncated_tokens += num_cut
                    yield record
        count.straddling_tokens, count.round_trip = encoder.straddling, round_trip.counts

    def _item(self, raw: RawRecord, spec: SourceSpec, count: SourceCount, log: Callable[[str], None]) -> Item:
        if raw.problem is not None:
            raise Unusable(raw.problem)
        if count.format is None:
            count.format, count.detected = detect_format(raw.value), True
            log(f"source {spec.name}: format {count.format}, seen from {raw.file}:{raw.line}")
        for key, allowed in spec.filters.items():
            if raw.value.get(key) not in allowed:
                raise _Drop(f"filter {key}")
        try:
            item = to_item(raw.value, count.format)
        except (KeyError, TypeError) as error:
            raise Unusable(f"not in the format {count.format}: {type(error).__name__} {error}") from None
        check_label(item.source, f"{raw.file}:{raw.line}")
        return item

    def _encode(
        self, items: list[tuple[RawRecord, Item]], encoder: SpanTokenizer, round_trip: RoundTrip
    ) -> Iterator[tuple[RawRecord, Item, Encoded | Unusable]]:
        """Token ids and mask of every item, in order: kept where they came with it, else from its text."""
        texts, spans, prompts, places = [], [], [], {}
        for position, (_, item) in enumerate(items):
            if item.format == "tokenized":
                continue
            if self._exact(item) is not None and round_trip.counts.total() + len(texts) >= _ROUND_TRIPS:
                continue
            try:
                text, mine = self._rendered(item)
                only_text = item.format == "response" and item.input_ids is None
                prompts.append(self.renderer.prompt(item.messages[:-1], item.tools) if only_text else None)
            except Unusable as unusable:
                places[position] = unusable
                continue
            places[position] = len(texts)
            texts.append(text)
            spans.append(mine)
        encoded = encoder.encode_batch(texts, spans)
        for position, (raw, item) in enumerate(items):
            place, exact = places.get(position), self._exact(item)
            result = encoded[place] if isinstance(place, int) else place
            if isinstance(result, tuple) and item.format == "response":
                if item.input_ids is not None:
                    round_trip.compare(item.input_ids, result[0])
                else:
                    answer = item.messages[-1]["content"]
                    round_trip.check(prompts[place], answer, item.num_generated, texts[place], result)
            yield raw, item, result if exact is None else exact

    def _exact(self, item: Item) -> Encoded | None:
        """Ids and mask that came with an item; None where they must be made from its text.

        Generated ids do not stand when reasoning is to be dropped or unsupervised and there is some; where there is
        nothing else, since the answer never left the reasoning that its prompt opened, nothing is supervised.
        """
        if item.format != "response" or item.input_ids is None:
            return None if item.input_ids is None else (item.input_ids, item.loss_mask)
        if self.config.reasoning != "keep":
            thoughts = [self.renderer.split(m)[0] for m in item.messages if m["role"] == "assistant"]
            before = item.input_ids[: item.answer_start][-16:]  # enough for `<think>`
            if thoughts[-1] is None and self.tokenizer.decode(before).rstrip().endswith("<think>"):
                return item.input_ids, [0] * len(item.input_ids)
            if any(thoughts):
                return None
        if self.config.supervise == "all_turns":
            return item.input_ids, item.loss_mask
        return item.input_ids, [0] * item.answer_start + item.loss_mask[item.answer_start :]

    def _rendered(self, item: Item) -> tuple[str, list]:
        if item.text is not None:
            return item.text, [(0, len(item.text))]
        return self.renderer.render(item.messages, item.tools, finished=item.finish_reason != "length")

    def _record(self, item: Item, encoded: Encoded | Unusable) -> tuple[Record, int]:
        """The record, cut to length, and how many tokens were cut; id and source are empty where the item has none."""
        if isinstance(encoded, Unusable):
            raise encoded
        input_ids, loss_mask = encoded
        problem = problem_with(input_ids, loss_mask, self.vocab_size)
        if problem:
            raise Unusable(problem)
        limit = self.config.max_seq_len
        if len(input_ids) > limit:
            limit = limit if self.config.truncate == "hard" else last_turn_end(loss_mask, limit)
        record = Record(item.id or "", item.source or "", input_ids[:limit], loss_mask[:limit])
        if sum(record.loss_mask) < self.config.min_supervised_tokens:
            raise Unusable(f"fewer than {self.config.min_supervised_tokens} supervised tokens")
        return record, len(input_ids) - record.num_tokens

    def _refuse_copies(self, key: str, item: Item) -> None:
        """Raise `_Drop` for a leak from the evaluation prompts or a copy of an earlier record."""
        if len(self._decontaminator):
            turns = [
                part for turn in item.messages for part in (turn["content"], turn.get("reasoning_content")) if part
            ]
            leak = self._decontaminator.leak(turns or [self._text(item)])
            if leak is not None:
                raise _Drop(f"{DUPLICATES[2]}: {leak}")
        if self.config.dedupe == "none":
            return
        text = self._text(item)
        if (same := text_key(text)) in self._texts:
            raise _Drop(DUPLICATES[0])
        self._texts[same] = None
        if self._near is not None and (earlier := self._near.find_or_add(key, text)) is not None:
            raise _Drop(f"{DUPLICATES[1]}: {earlier}")

    def _text(self, item: Item) -> str:
        if item.format != "tokenized":
            calls = [turn["tool_calls"] for turn in item.messages if "tool_calls" in turn]
            return text_of(item) + (f"\n{json.dumps(calls, ensure_ascii=False)}" if calls else "")
        return self.tokenizer.decode(item.input_ids, clean_up_tokenization_spaces=False)

    def _unique_id(self, name: str, spec_name: str, line: int) -> str:
        last = f"{spec_name}/{name}#{line}"
        more = (f"{last}#{number}" for number in itertools.count(2))
        candidates = itertools.chain((name, f"{spec_name}/{name}", last), more)
        free = next(candidate for candidate in candidates if candidate not in self._ids)
        self._ids.add(free)
        return free


def last_turn_end(loss_mask: list[int], limit: int) -> int:
    """Where the last supervised turn that ends within `limit` tokens ends; 0 when none does."""
    end = limit
    while end > 0 and not (loss_mask[end - 1] and (end == len(loss_mask) or not loss_mask[end])):
        end -= 1
    return end


def _chunks(records: Iterable[RawRecord]) -> Iterator[list[RawRecord]]:
    chunk, size = [], 0
    for raw in records:
        chunk.append(raw)
        size += raw.size
        if len(chunk) >= _CHUNK or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
