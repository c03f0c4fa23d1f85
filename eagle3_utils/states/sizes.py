"""Bytes: of a stored row, of a whole store by tensor, of a staged dump. Shared by the plan and the extraction."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from eagle3_utils.errors import UserError
from eagle3_utils.states.codec import CODECS, FINALS, supervised_rows

INDEX_BYTES_PER_TOKEN = 4 + 1 + 1  # input_ids, loss_mask, final_rows
STAGING_SHARES = 5  # one for dumps in flight, the rest for dumps of open shards and host buffers
INDEX_BYTES_PER_SAMPLE = 200  # id, source, offsets, checksum in the shard; a row in the ledger


@dataclass(frozen=True)
class CorpusNumbers:
    """What a plan needs to know of a corpus. `num_final_rows`: rows whose prediction is supervised."""

    num_samples: int
    num_tokens: int
    num_final_rows: int
    longest: int

    @classmethod
    def of(cls, records: list) -> CorpusNumbers:
        """Count a list of records (input_ids, loss_mask)."""
        lengths = [len(record.input_ids) for record in records]
        rows = sum(int(supervised_rows(np.asarray(record.loss_mask)).sum()) for record in records)
        return cls(len(records), sum(lengths), rows, max(lengths, default=0))

    def require_lengths(self, max_seq_len: int, max_position_embeddings: int) -> None:
        """Raise `UserError` when a sample is longer than the parameters or the model allow: half would vanish."""
        for name, limit in (
            ("max_seq_len", max_seq_len),
            ("the model's max_position_embeddings", max_position_embeddings),
        ):
            if self.longest > limit:
                raise UserError(
                    f"the longest sample has {self.longest} tokens, {name} is {limit}",
                    "corpus",
                    "give every stage the same max_seq_len and run stage 01 again",
                )

    def __add__(self, other: CorpusNumbers) -> CorpusNumbers:
        return CorpusNumbers(
            self.num_samples + other.num_samples,
            self.num_tokens + other.num_tokens,
            self.num_final_rows + other.num_final_rows,
            max(self.longest, other.longest),
        )


def bytes_per_row(hidden_size: int, codec: str) -> int:
    """Stored bytes of one state of one token: 2H in bf16, H and a float32 scale in fp8."""
    return 2 * hidden_size if codec == "bf16" else hidden_size + 4


def state_bytes(corpus: CorpusNumbers, hidden_size: int, num_aux: int, codec: str, final: str) -> dict[str, int]:
    """Bytes of a whole store by tensor: aux, final, index."""
    row = bytes_per_row(hidden_size, codec)
    final_rows = corpus.num_tokens if final == "all" else corpus.num_final_rows
    index = corpus.num_tokens * INDEX_BYTES_PER_TOKEN + corpus.num_samples * INDEX_BYTES_PER_SAMPLE
    return {"aux": corpus.num_tokens * num_aux * row, "final": final_rows * row, "index": index}


def codec_table(corpus: CorpusNumbers, hidden_size: int, num_aux: int) -> list[dict]:
    """Bytes by every codec: of a token by tensor, of its states together, and of the whole store."""
    table, tokens = [], max(1, corpus.num_tokens)
    for codec, final in product(CODECS, FINALS):
        sizes = state_bytes(corpus, hidden_size, num_aux, codec, final)
        per_token = {name: size / tokens for name, size in sizes.items()}
        states = per_token["aux"] + per_token["final"]
        table.append({"codec": codec, "final": final, "bytes_per_token": per_token, "state_bytes_per_token": states})
        table[-1]["store_bytes"] = sum(sizes.values())
    return table


def staging_needed(longest: int, dump_per_token: int, num_writers: int) -> int:
    """Bytes a server's staging must have: its groups that write share it, and any may get the longest sample."""
    return STAGING_SHARES * longest * dump_per_token * num_writers


def held_limit(staging_bytes: int, num_open: int) -> int:
    """Bytes of dumps that one of `num_open` open shards may hold: all of them together half of the staging area."""
    return staging_bytes // (2 * num_open)


def shard_limit(
    shard_bytes: int, staging_bytes: int, num_open: int, stored_per_token: float, dump_per_token: int
) -> int:
    """Bytes at which a shard is closed: its own limit, or when its dumps fill their share of staging."""
    by_staging = held_limit(staging_bytes, num_open) / dump_per_token * stored_per_token
    return max(1, min(shard_bytes, int(by_staging)))


def dump_bytes_per_token(hidden_size: int, num_aux: int) -> int:
    """Bytes a staged dump holds per token: every state in bf16, and the token id."""
    return 2 * hidden_size * (num_aux + 1) + 8


def format_bytes(num_bytes: float) -> str:
    """A byte count for people: 4.58 TiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


def format_codec(entry: dict) -> str:
    """A row of `codec_table` for people."""
    per_token, size = entry["state_bytes_per_token"], format_bytes(entry["store_bytes"])
    return f"{entry['codec']}, {entry['final']}: {per_token:,.0f} B a token, {size}"
