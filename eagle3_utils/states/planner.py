"""What an extraction will cost, before it starts: bytes, staging, shards, hours, and whether they fit.

Needs neither GPU nor weights. The reference run guessed 3.5 TB, then 4.7 TB, half-way through; the arithmetic is one
line: 87.8 M tokens × 4 states × 7,168 × 2 bytes = 4.58 TiB.

Legend: T tokens, L auxiliary layers, H hidden.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from eagle3_utils.config import ExtractConfig, read_parameters, stage_parameters
from eagle3_utils.corpus.records import read_parquet
from eagle3_utils.errors import UserError
from eagle3_utils.runs import data_folder, read_json, resolve_path
from eagle3_utils.serving.probe import probe_path
from eagle3_utils.states.shards.builders import processes_for
from eagle3_utils.states.sizes import (
    CorpusNumbers,
    codec_table,
    dump_bytes_per_token,
    format_bytes,
    format_codec,
    shard_limit,
    staging_needed,
)
from eagle3_utils.states.store import num_open_shards
from eagle3_utils.target import EXAMPLE_FOLDER, load_target

READ_BYTES_PER_SECOND = 1.4e9  # a plain NVMe disk, when nothing was measured
_IN_MEMORY = ("tmpfs", "devtmpfs", "ramfs")
PLANNED = ("hidden_size", "num_samples", "num_tokens", "supervised_share", "longest",
           "slowest_tokens_per_second", "fastest_tokens_per_second")  # fmt: skip


@dataclass
class Plan:
    """The answer. Sizes in bytes; `hours` of what is not stored yet, (low, high), or None when no rate is known."""

    codec: str
    final: str
    num_samples: int
    num_tokens: int
    bytes_per_token: dict[str, float]
    store_bytes: int
    stored_bytes: int  # there already, from an earlier run
    disk_free_bytes: int
    disk_needed_bytes: int
    num_shards: int
    staging_needed_bytes: int
    staging_available_bytes: int
    tokens_per_second: tuple[float, float] | None
    hours: tuple[float, float] | None
    epoch_read_seconds: float
    codecs: list[dict]  # of every codec: codec, final, bytes_per_token, state_bytes_per_token, store_bytes
    problems: list[str] = field(default_factory=list)
    options: list[dict] = field(default_factory=list)  # what would fit instead

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def shortfall_bytes(self) -> int:
        """Bytes of disk missing; 0 when the store fits."""
        return max(0, self.disk_needed_bytes - self.disk_free_bytes)

    def to_json(self) -> dict:
        """For --json and metrics.json."""
        return asdict(self) | {"fits": self.fits, "shortfall_bytes": self.shortfall_bytes}

    def text(self) -> str:
        """A few lines for a terminal or a notebook."""
        per_token = ", ".join(f"{name} {size:,.0f}" for name, size in self.bytes_per_token.items())
        lines = [
            f"corpus    {self.num_samples:,} samples, {self.num_tokens:,} tokens",
            f"store     {format_bytes(self.store_bytes)} in {self.num_shards:,} shards "
            f"(codec {self.codec}, final {self.final}; bytes per token: {per_token})",
            "codecs    " + "\n          ".join(map(format_codec, self.codecs)),
            f"disk      {format_bytes(self.disk_needed_bytes)} needed (staging and what must stay free included), "
            f"{format_bytes(self.disk_free_bytes)} free"
            + (f", {format_bytes(self.stored_bytes)} stored already" if self.stored_bytes else ""),
            f"staging   {format_bytes(self.staging_needed_bytes)} needed for the longest sample, "
            f"{format_bytes(self.staging_available_bytes)} available",
            f"time      {_hours(self.hours)} to extract; {_hours([self.epoch_read_seconds / 3600])} to read once "
            f"at {READ_BYTES_PER_SECOND / 1e9:.1f} GB/s",
        ]
        lines += [f"PROBLEM   {problem}" for problem in self.problems]
        lines += [f"would fit {option['change']}" for option in self.options]
        return "\n".join(lines)

    def require(self) -> None:
        """Raise `UserError` (exit code 2) with the shortfall and what would fit."""
        if self.fits:
            return
        options = "; ".join(option["change"] for option in self.options) or "free space"
        raise UserError("; ".join(self.problems), "plan", f"what would fit: {options}", exit_code=2)


def plan(
    corpus: CorpusNumbers,
    hidden_size: int,
    num_aux: int,
    codec: str,
    final: str,
    folder: Path,
    staging_dir: Path,
    staging_max_bytes: int,
    shard_bytes: int = 2 << 30,
    min_free_bytes: int = 0,
    tokens_per_second: tuple[float, float] | None = None,
    num_open: int = num_open_shards(0),
    num_writers: int = 1,
) -> Plan:
    """Work out a store before it is made.

    Parameters
    ----------
    folder : where the shards go; it need not exist yet.
    staging_dir, staging_max_bytes : where dumps wait, and how much of it they may fill.
    min_free_bytes : what must stay free on the store's disk.
    tokens_per_second : (low, high), measured by the pilot or assumed; None: no hours.
    num_open, num_writers : shards open at a time, and a server's groups that write; both share the staging area.
    """
    codecs = codec_table(corpus, hidden_size, num_aux)
    chosen = next(entry for entry in codecs if (entry["codec"], entry["final"]) == (codec, final))
    total, stored, free = chosen["store_bytes"], _stored_bytes(folder), _free_bytes(folder)
    staging, per_dump = min(staging_max_bytes, _free_bytes(staging_dir)), dump_bytes_per_token(hidden_size, num_aux)
    limit = shard_limit(shard_bytes, staging, num_open, total / max(1, corpus.num_tokens), per_dump)
    needed = max(0, total - stored) + min_free_bytes + (staging if _device(folder) == _device(staging_dir) else 0)
    result = Plan(
        codec=codec,
        final=final,
        num_samples=corpus.num_samples,
        num_tokens=corpus.num_tokens,
        bytes_per_token=chosen["bytes_per_token"],
        store_bytes=total,
        stored_bytes=stored,
        disk_free_bytes=free,
        disk_needed_bytes=needed,
        num_shards=-(-total // limit),
        staging_needed_bytes=staging_needed(corpus.longest, per_dump, num_writers),
        staging_available_bytes=staging,
        tokens_per_second=tokens_per_second,
        hours=_hours_at(corpus.num_tokens * max(0, total - stored) / max(1, total), tokens_per_second),
        epoch_read_seconds=total / READ_BYTES_PER_SECOND,
        codecs=codecs,
    )
    if needed > free:
        needs, has, short = map(format_bytes, (needed, free, needed - free))
        result.problems.append(f"the store needs {needs} on {folder}, {has} are free: {short} short")
        result.options = _options(result, needed - free) + _other_disks(folder, total + min_free_bytes)
    if result.staging_needed_bytes > staging:
        result.problems.append(
            f"staging needs {format_bytes(result.staging_needed_bytes)} for the longest sample "
            f"({corpus.longest} tokens), {format_bytes(staging)} are allowed and free in {staging_dir}"
        )
        result.options.append({"change": "a larger staging_max_bytes, a staging_dir on disk, or shorter samples"})
    return result


def plan_from_parameters(path: Path, overrides: list[str] = ()) -> Plan:
    """`eagle3 plan`: the plan of stage 03 for a parameters file, before anything of the run need exist.

    Raises `UserError` (exit code 2) when neither the run nor `planned` says how large model and corpus are.
    """
    parameters = read_parameters(Path(path), list(overrides))
    return plan_stage(ExtractConfig.parse(stage_parameters(parameters, ExtractConfig.stage), str(path)))


def plan_stage(config: ExtractConfig, rate: tuple[float, float] | None = None) -> Plan:
    """The plan of a run: measured numbers where the run has them, `config.planned` for the rest.

    Corpus: the run's Parquet files. Model: its config.json, if it is a folder here. Rate: `rate`, else the pilot of
    the probe, else planned.
    """
    planned = config.planned
    if unknown := set(planned) - set(PLANNED):
        raise UserError(f"planned: unknown key {min(unknown)!r}; there are {', '.join(PLANNED)}", exit_code=2)
    if rate is None:
        rate = _pilot_rate(config)
    if rate is None and "slowest_tokens_per_second" in planned:
        slowest = planned["slowest_tokens_per_second"]
        rate = (slowest, planned.get("fastest_tokens_per_second", slowest))
    data = data_folder(config)
    return plan(
        _corpus_numbers(config, data),
        _hidden_size(config),
        len(config.aux_layers or [0, 0, 0]),
        config.codec,
        config.final,
        data / "hidden_states",
        resolve_path(config.staging_dir) if config.staging_dir else _existing(Path("/dev/shm")),
        config.staging_max_bytes,
        config.shard_bytes,
        config.min_free_bytes,
        rate,
        num_open=num_open_shards(processes_for(config.shard_builders)),
        num_writers=config.dp_size,
    )


def _corpus_numbers(config: ExtractConfig, data: Path) -> CorpusNumbers:
    files = [data / "corpus" / f"{split}.parquet" for split in ("train", "val")]
    if all(file.is_file() for file in files):
        train, val = (CorpusNumbers.of(list(read_parquet(file))) for file in files)
        return train + val
    names = ("num_samples", "num_tokens", "supervised_share", "longest")
    if missing := [name for name in names if name not in config.planned]:
        raise UserError(
            f"no corpus yet and planned.{missing[0]} is not set",
            str(data / "corpus"),
            "run stage 01 first, or set 03_extract_hidden_states.planned",
            exit_code=2,
        )
    samples, tokens, share, longest = (config.planned[name] for name in names)
    return CorpusNumbers(int(samples), int(tokens), int(tokens * share), int(longest))


def _hidden_size(config: ExtractConfig) -> int:
    is_example = config.model == "example"  # made where it is first needed
    if resolve_path(EXAMPLE_FOLDER if is_example else config.model).is_dir():
        return load_target(config.model, config.trust_remote_code).hidden_size
    if "hidden_size" in config.planned:
        return int(config.planned["hidden_size"])
    if is_example:
        return load_target(config.model).hidden_size
    raise UserError("the model is no folder here and planned.hidden_size is not set", config.model, exit_code=2)


def _pilot_rate(config: ExtractConfig) -> tuple[float, float] | None:
    pilot = (read_json(probe_path(config)) or {}).get("pilot")
    if not pilot or not pilot.get("tokens_per_second"):
        return None
    mean = pilot["tokens_per_second"]
    return pilot.get("tokens_per_second_low", mean), pilot.get("tokens_per_second_high", mean)


def _options(planned: Plan, missing: int) -> list[dict]:
    """Codecs and corpus sizes that would save the bytes missing."""
    options, total = [], planned.store_bytes
    for entry in planned.codecs:
        if total - (size := entry["store_bytes"]) >= missing:
            change = f"codec: {entry['codec']}, final: {entry['final']} ({format_bytes(size)})"
            options.append({"change": change, "store_bytes": size})
    if affordable := int(planned.num_samples * max(0, total - missing) / max(1, total)):
        options.append({"change": f"at most {affordable:,} samples of this mix", "num_samples": affordable})
    return options


def _other_disks(folder: Path, needed: int) -> list[dict]:
    """Mounted disks, those of a network too, that have so much room; each once, whatever it is mounted on."""
    options, seen = [], {_device(folder)}
    for mount in psutil.disk_partitions(all=True):
        path, writable = Path(mount.mountpoint), "ro" not in mount.opts.split(",")
        if mount.fstype in _IN_MEMORY or not (writable and os.access(path, os.R_OK | os.X_OK) and path.is_dir()):
            continue
        if _device(path) not in seen and (free := _free_bytes(path)) >= needed:
            options.append({"change": f"data_root under {path} ({format_bytes(free)} free)"})
        seen.add(_device(path))
    return options


def _hours_at(num_tokens: float, rates: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if rates is None else (num_tokens / rates[1] / 3600, num_tokens / rates[0] / 3600)


def _hours(hours) -> str:
    if hours is None:
        return "unknown"
    low, high = min(hours), max(hours)
    unit, scale = ("h", 1) if high >= 1 else ("min", 60) if high >= 1 / 60 else ("s", 3600)
    numbers = f"{low * scale:.1f}" if low == high else f"{low * scale:.1f} to {high * scale:.1f}"
    return f"{numbers} {unit}"


def _existing(folder: Path) -> Path:
    folder = Path(folder).absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(_existing(folder)).free


def _device(folder: Path) -> int:
    return _existing(folder).stat().st_dev


def _stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("shard-*.h5")) if Path(folder).is_dir() else 0
