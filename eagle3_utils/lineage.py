"""What each stage reads: the one table behind "a stage whose inputs changed refuses to run and says which".

An input is the output of an earlier stage of the same run, a file named in the parameters, or the target itself; each
is known by a content hash.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

import httpx

from eagle3_utils import runs
from eagle3_utils.config import StageConfig
from eagle3_utils.corpus.reading.sources import SourceSpec, parse_sources, source_files
from eagle3_utils.errors import UserError, first_line
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.target import load_target

# stage → {input name: (earlier stage, its output)}
UPSTREAM: dict[str, dict[str, tuple[str, str]]] = {
    "00_generate_responses": {},
    "01_merge_data": {"responses": ("00_generate_responses", "responses")},
    "02_patch_and_probe": {"corpus": ("01_merge_data", "corpus")},
    "03_extract_hidden_states": {"corpus": ("01_merge_data", "corpus"), "probe": ("02_patch_and_probe", "probe")},
    "04_train_draft": {"corpus": ("01_merge_data", "corpus"), "states": ("03_extract_hidden_states", "states")},
    "05_evaluate_acceptance": {
        "states": ("03_extract_hidden_states", "states"),
        "draft": ("04_train_draft", "draft"),
    },
    "06_inspect_hidden_states": {"states": ("03_extract_hidden_states", "states")},
}


def stage_inputs(config: StageConfig) -> dict[str, str]:
    """Name → content hash of everything the stage reads.

    Raises
    ------
    UserError
        When an earlier stage it needs is not done, or a file or dataset named in the parameters does not exist.
    """
    inputs = {"target": load_target(config.model, config.trust_remote_code).fingerprint}
    for name, (stage, output) in UPSTREAM[config.stage].items():
        if name == "responses" and not reads_responses(config):
            continue
        inputs[name] = runs.output_of(config, stage, output)
    for path in _files(config):
        inputs[f"file {path}"] = runs.hash_files([runs.resolve_path(path)])
    for spec in _sources(config):
        if spec.hf:
            inputs[f"dataset {spec.hf}"] = _dataset_hash(spec, config)
        elif runs.resolve_path(spec.path) != _responses(config):
            files = [file for file in source_files(spec) if file != _responses(config)]
            inputs[f"file {spec.path}"] = runs.hash_files(files)
    for folder in getattr(config, "more_data", []):
        name, stores = f"states of {folder}", _stores(runs.resolve_path(folder))
        states = [store and StoreReader(store).content_hash() for store in stores]
        inputs[name] = runs.hash_json(states) if any(states) else _recorded(config, name)
    if init_from := getattr(config, "init_from", None):
        name, folder = f"draft {init_from}", runs.resolve_path(init_from)
        inputs[name] = _folder_hash(folder) if folder.is_dir() else _recorded(config, name)
    return inputs


def _sources(config: StageConfig) -> list[SourceSpec]:
    entries = getattr(config, "sources", [])
    return parse_sources(entries, runs.data_folder(config)) if entries else []


def _responses(config: StageConfig) -> Path:
    """What stage 00 makes."""
    return runs.data_folder(config) / "responses.jsonl"


def _stores(data: Path) -> list[Path | None]:
    """The stores of hidden states under another run's data folder; None for one that is not there."""
    folders = [data / "hidden_states" / split for split in ("train", "val")]
    return [folder if folder.is_dir() else None for folder in folders]


def _folder_hash(folder: Path) -> str:
    return runs.hash_files(sorted(path for path in folder.rglob("*") if path.is_file()))


def _recorded(config: StageConfig, name: str) -> str:
    """What a finished stage has read and nobody can read any more; empty when it is not done."""
    done = runs.read_done(runs.resolve_path(config.run_dir), config.stage) or {"inputs": {}}
    return done["inputs"].get(name, "")


def _dataset_hash(spec: SourceSpec, config: StageConfig) -> str:
    """Of a folder its files' hash, of a dataset on the hub its commit; without the hub, the one read before."""
    folder = runs.resolve_path(spec.hf)
    if folder.is_dir():
        return _folder_hash(folder)
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(spec.hf).sha
    except (OSError, ValueError, httpx.HTTPError) as error:
        if recorded := _recorded(config, f"dataset {spec.hf}"):
            return recorded
        raise UserError(f"cannot find this dataset: {first_line(error)}", f"sources: {spec.name}: {spec.hf}") from None


def reads_responses(config: StageConfig) -> bool:
    """Whether a source of stage 01 takes in this run's responses, by name, folder or pattern: so it needs stage 00."""
    responses, paths = _responses(config), [runs.resolve_path(spec.path) for spec in _sources(config) if spec.path]
    return any(responses.is_relative_to(path) or fnmatch(str(responses), str(path)) for path in paths)


def _files(config: StageConfig) -> list[str]:
    paths: list[str] = []
    for field in ("prompts", "earlier_responses", "decontaminate_with"):
        paths += getattr(config, field, None) or []
    for path in paths:
        if not runs.resolve_path(path).exists():
            raise UserError("no such file or folder", f"{config.stage}: {path}", exit_code=2)
    return [path for path in paths if runs.resolve_path(path).is_file()]
