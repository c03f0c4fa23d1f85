"""One strict model per stage: the parameters a notebook takes, their types and their defaults.

A parameters file (`parameters/*.yaml`) has a `shared:` section and one per stage. `stage_parameters` flattens
`shared` + stage; a model turns the flat dict into a config or says which key is wrong. In a notebook, which holds
the same names as variables of its `parameters` cell: `config = MergeConfig.from_notebook(globals())`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from eagle3_utils import strict_yaml
from eagle3_utils.errors import UserError
from eagle3_utils.parameter_types import NumDraftTokens, Switch, TreeNumbers


class StageConfig(BaseModel):
    """What every stage takes. Paths are relative to the repository root."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    stage: ClassVar[str]

    run_dir: str = "outputs/smollm2-cpu"  # the run folder
    data_root: str | None = None  # where corpus, states and draft go; default: run_dir/data
    model: str = "example"  # target: "example", a Hugging Face folder, or a name on the hub
    trust_remote_code: bool = False  # run the modelling or tokenizer code that ships with the target
    max_seq_len: int = Field(1024, ge=2)  # tokens per sample, at most
    seed: int = Field(0, ge=0)

    @classmethod
    def from_notebook(cls, namespace: dict[str, Any]):
        """Build the config from a notebook's `globals()`; names that are no parameters are left alone."""
        return cls.parse({name: namespace[name] for name in cls.model_fields if name in namespace})

    @classmethod
    def parse(cls, values: dict[str, Any], source: str = "parameters"):
        """Validate a flat dict; a wrong key or type is a `UserError` that names it."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise UserError(_first_problem(cls, error), f"{source}: {cls.stage}", exit_code=2) from None


class ServingOptions(BaseModel):
    """How the SGLang server of a stage is started. What each flag is for is said in parameters/smollm2-cpu.yaml."""

    server_python: str | None = None
    server_urls: list[str] = []
    server_dump_dirs: list[str] = []
    device: Literal["auto", "cpu", "cuda"] = "auto"
    port: int = Field(0, ge=0, le=65535)
    startup_timeout_seconds: float = Field(900.0, gt=0)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    tp_size: int = Field(1, ge=1)
    ep_size: int = Field(1, ge=1)
    dp_size: int = Field(1, ge=1)
    mem_fraction_static: float | None = Field(None, gt=0, lt=1)
    chunked_prefill_size: int | None = None
    max_running_requests: int | None = Field(None, ge=1)
    attention_backend: str | None = None
    disable_custom_all_reduce: bool = True
    disable_overlap_schedule: bool | None = None
    extra_server_args: list[str] = []


class CaptureOptions(BaseModel):
    """What the capture plugin leaves, and where."""

    aux_layers: list[int] | None = None  # 0-based decoder layers whose output is captured; default [1, n//2-1, n-4]
    staging_dir: str | None = None  # default: /dev/shm where it exists, else the run folder
    staging_max_bytes: int = Field(4 << 30, ge=1 << 20)  # capture waits when its dumps hold this much


class GenerateConfig(ServingOptions, StageConfig):
    stage: ClassVar[str] = "00_generate_responses"

    prompts: list[str] = ["data/prompts/chat.jsonl", "data/prompts/maths.jsonl", "data/prompts/code.jsonl"]
    earlier_responses: list[str] = ["data/responses/smollm2-135m-instruct.jsonl.zst"]  # taken as already done
    synthesise_prompts: int = Field(0, ge=0)  # so many more that the target makes up itself
    synthesise_language: Literal["english", "any"] = "english"  # which of them are kept
    endpoints: list[str] = []  # empty: start SGLang here; else http(s) addresses
    api: Literal["sglang", "openai"] = "sglang"
    api_model: str | None = None  # the model's name at an OpenAI-style endpoint
    extra_body: dict[str, Any] = {}  # laid over every request; null takes a field out
    max_new_responses: int | None = None  # None: answer every prompt that has no answer yet
    temperature: float = Field(0.7, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_new_tokens: int = Field(256, ge=1)
    num_concurrent: int = Field(32, ge=1)
    max_retries: int = Field(5, ge=0)
    max_failed_fraction: float = Field(0.02, ge=0, le=1)
    request_timeout_seconds: float = Field(600.0, gt=0)


class MergeConfig(StageConfig):
    stage: ClassVar[str] = "01_merge_data"

    sources: list[dict[str, Any]] = [{"name": "responses", "path": "{data}/responses.jsonl"}]
    supervise: Literal["all_turns", "last_turn"] = "all_turns"
    reasoning: Literal["keep", "drop", "unsupervised"] = "keep"
    truncate: Literal["hard", "turn"] = "hard"
    min_supervised_tokens: int = Field(4, ge=1)
    dedupe: Literal["none", "exact", "near"] = "near"
    near_threshold: float = Field(0.8, gt=0, le=1)
    decontaminate_with: list[str] = ["data/prompts/chat.jsonl", "data/prompts/maths.jsonl", "data/prompts/code.jsonl"]
    decontaminate_ngram: int = Field(13, ge=3)
    val_fraction: float = Field(0.1, gt=0, lt=1)
    max_rejected_fraction: float = Field(0.05, ge=0, le=1)
    supervised_share_bounds: list[float] = Field([0.02, 0.98], min_length=2, max_length=2)


class ProbeConfig(ServingOptions, CaptureOptions, StageConfig):
    stage: ClassVar[str] = "02_patch_and_probe"

    num_probe_samples: int = Field(8, ge=2)
    num_pilot_samples: int = Field(32, ge=1)
    num_concurrent: int = Field(32, ge=1)
    reference: Literal["auto", "huggingface", "anchored"] = "auto"
    min_layer_cosine: float = Field(0.99, gt=0, le=1)
    max_logprob_error: float = Field(0.05, gt=0)


class ExtractConfig(ServingOptions, CaptureOptions, StageConfig):
    stage: ClassVar[str] = "03_extract_hidden_states"

    codec: Literal["bf16", "fp8"] = "bf16"
    final: Literal["all", "supervised"] = "supervised"
    shard_bytes: int = Field(2 << 30, ge=1 << 20)
    shard_builders: int | None = Field(None, ge=0)  # processes that encode and write; None: by the number of cores
    max_tokens_in_flight: int = Field(32768, ge=1)
    max_retries: int = Field(3, ge=0)
    request_timeout_seconds: float = Field(600.0, gt=0)
    max_failed: int = Field(0, ge=0)
    min_free_bytes: int = Field(2 << 30, ge=0)
    num_pilot_samples: int = Field(16, ge=1)  # stored first, in bf16: the codec is judged and the rate measured on them
    max_codec_kl: float = Field(0.02, ge=0)
    min_codec_agreement: float = Field(0.97, ge=0, le=1)
    deep_verify: bool = True  # read every stored byte again at the end
    planned: dict[str, float] = {}  # for `eagle3 plan` before model and corpus are here; keys: states/planner.py


class TrainConfig(StageConfig):
    stage: ClassVar[str] = "04_train_draft"

    more_data: list[str] = []
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_gpus: int = Field(1, ge=0)
    sharding: Literal["none", "fsdp"] = "none"
    draft_vocab_size: int = Field(4096, ge=1)
    layer_kind: Literal["llama", "mla"] = "llama"
    intermediate_size: int | None = Field(None, ge=1)
    rope: dict[str, Any] | None = None
    ttt_steps: int = Field(3, ge=1)
    step_weight_decay: float = Field(0.8, gt=0, le=1)
    loss: Literal["soft", "hard", "lk_alpha", "lk_lambda"] = "soft"
    fc_norm: bool = True
    norm_output: bool = True
    init: Literal["target_layer", "random"] = "target_layer"
    init_from: str | None = None
    freeze_lm_head: bool = False
    epochs: float = Field(3.0, gt=0, allow_inf_nan=False)
    max_tokens_per_step: int = Field(1024, ge=16)
    batches_per_step: int = Field(1, ge=1, validate_default=True)
    learning_rate: float = Field(1.0e-3, gt=0, allow_inf_nan=False)
    warmup_fraction: float = Field(0.05, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    max_grad_norm: float = Field(0.5, gt=0)
    validate_every_steps: int = Field(50, ge=1)
    checkpoint_every_steps: int = Field(50, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    max_nonfinite_in_a_row: int = Field(3, ge=1)
    prefetch_batches: int = Field(2, ge=0)
    max_rows_at_once: int = Field(8192, ge=1)
    frozen_on_host: bool = False

    @field_validator("batches_per_step")
    @classmethod
    def _is_shared_out(cls, batches: int, others: ValidationInfo) -> int:
        if batches % max(1, others.data.get("num_gpus", 1)):
            raise ValueError(f"must be a multiple of num_gpus, {others.data['num_gpus']} for instance")
        return batches


class EvaluateConfig(ServingOptions, StageConfig):
    stage: ClassVar[str] = "05_evaluate_acceptance"

    max_val_samples: int = Field(200, ge=2)
    num_offline_steps: int = Field(5, ge=1)
    prompts: list[str] = ["data/prompts/chat.jsonl", "data/prompts/maths.jsonl", "data/prompts/code.jsonl"]
    prompt_sets: list[dict[str, Any]] = []
    reference_decoding: bool = True
    prompts_per_source: int = Field(4, ge=1)
    plain_prompts_per_source: int = Field(1, ge=0)
    max_new_tokens: int = Field(40, ge=2)
    num_steps: int = Field(3, ge=1)
    topk: int = Field(1, ge=1)
    num_draft_tokens: NumDraftTokens = None
    replay_shapes: list[TreeNumbers] = [[1, 1, 2], [3, 1, 4], [5, 1, 6], [3, 4, 8]]
    served: Switch = "auto"
    served_shapes: list[TreeNumbers] = [[3, 1, 4]]
    served_concurrency: list[Annotated[int, Field(ge=1)]] = Field([1, 8, 32], min_length=1)
    served_prompts_per_source: int = Field(60, ge=1)
    served_max_new_tokens: int = Field(256, ge=2)
    parity_tolerance: float = Field(0.02, gt=0)


class InspectConfig(StageConfig):
    stage: ClassVar[str] = "06_inspect_hidden_states"

    num_samples: int = Field(200, ge=1)
    massive_ratio: float = Field(1000.0, gt=1)
    spectrum_rows: int = Field(4096, ge=2)
    max_nonfinite_values: int = Field(0, ge=0)


STAGES: dict[str, type[StageConfig]] = {
    model.stage: model
    for model in (GenerateConfig, MergeConfig, ProbeConfig, ExtractConfig, TrainConfig, EvaluateConfig, InspectConfig)
}


def stage_named(name: str) -> str:
    """The full stage name for a number ("3", "03") or a name ("extract_hidden_states")."""
    for stage in STAGES:
        number, words = stage.split("_", 1)
        if name in (stage, words, number) or (name.isdigit() and int(name) == int(number)):
            return stage
    raise UserError(f"no stage {name!r}; there are {', '.join(STAGES)}", exit_code=2)


def read_parameters(path: Path, overrides: list[str] = ()) -> dict[str, dict[str, Any]]:
    """Read a parameters file: {"shared": {…}, STAGE: {…}}, with `stage.key=value` overrides applied.

    Raises `UserError` for a missing file, broken YAML, an unknown section, or a shared key that no stage has.
    """
    if not path.is_file():
        raise UserError("no such parameters file", str(path), exit_code=2)
    try:
        sections = strict_yaml.load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"not valid YAML: {' '.join(str(error).split())}", str(path), exit_code=2) from None
    if not isinstance(sections, dict):
        raise UserError("holds no sections", str(path), f"use shared, {', '.join(STAGES)}", exit_code=2)
    for section, values in sections.items():
        if section not in ("shared", *STAGES):
            raise UserError(f"unknown section {section!r}; use shared, {', '.join(STAGES)}", str(path), exit_code=2)
        if not isinstance(values, dict | None):
            raise UserError(f"section {section} must hold keys and values", str(path), exit_code=2)
    parameters = {section: dict(sections.get(section) or {}) for section in ("shared", *STAGES)}
    for override in overrides:
        section, key, value = _parse_override(override)
        parameters[section][key] = value
    known = {name for model in STAGES.values() for name in model.model_fields}
    for key in parameters["shared"]:
        if key not in known:
            raise UserError(f"shared.{key}: no stage has this key", str(path), _near(key, known), exit_code=2)
    return parameters


def stage_parameters(parameters: dict[str, dict[str, Any]], stage: str) -> dict[str, Any]:
    """`shared` (only the keys this stage has) + the stage's own section, as one flat dict."""
    fields = STAGES[stage].model_fields
    return {key: value for key, value in parameters["shared"].items() if key in fields} | parameters[stage]


def _parse_override(override: str) -> tuple[str, str, Any]:
    left, equals, value = override.partition("=")
    section, dot, key = left.partition(".")
    if not equals or not dot:
        raise UserError(f"--set {override!r}: write it as stage.key=value", exit_code=2)
    try:
        parsed = strict_yaml.load(value)
    except yaml.YAMLError as error:
        raise UserError(f"not valid YAML: {' '.join(str(error).split())}", f"--set {override}", exit_code=2) from None
    return ("shared" if section == "shared" else stage_named(section)), key, parsed


def _near(key: Any, known: Iterable[str]) -> str | None:
    """A question that names the known key most like this one (YAML may read a number); None when none is."""
    near = difflib.get_close_matches(str(key), list(known), 1)
    return f"did you mean {near[0]!r}?" if near else None


def _first_problem(model: type[StageConfig], error: ValidationError) -> str:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        known = _near(key, model.model_fields) or f"{model.stage} has {', '.join(model.model_fields)}"
        return f"unknown key {key!r}; {known}"
    hint = ""
    if problem["type"] == "float_type" and isinstance(problem["input"], str):
        hint = " (YAML reads 1e-4 as text: write 1.0e-4)"
    return f"{key} = {problem['input']!r}: {problem['msg'].lower().removeprefix('value error, ')}{hint}"
