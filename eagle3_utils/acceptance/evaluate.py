"""Stage 05 as a few calls: load what it needs, measure each way, and put the figures together.

work = Evaluation(config, stage)
samples, decoded, served_part = work.teacher_forced(), work.decode_held_out(), work.serve()
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from eagle3_utils import runs
from eagle3_utils.acceptance import changes, forward, heldout, offline, parity, served
from eagle3_utils.acceptance.heldout import DecodedPrompt
from eagle3_utils.acceptance.intervals import Interval
from eagle3_utils.acceptance.offline import SampleCounts
from eagle3_utils.acceptance.prompt_sets import Prompt, read_prompts
from eagle3_utils.acceptance.speculate import load_reference_model
from eagle3_utils.acceptance.tree import TreeShape
from eagle3_utils.config import EvaluateConfig, TrainConfig
from eagle3_utils.corpus.records import read_parquet
from eagle3_utils.draft import card
from eagle3_utils.draft.export import load_draft
from eagle3_utils.draft.network import DraftModel
from eagle3_utils.draft.training.build import draft_of_training
from eagle3_utils.draft.training.checkpoint import BEST_WEIGHTS
from eagle3_utils.draft.unrolling.teacher import Teacher
from eagle3_utils.errors import UserError
from eagle3_utils.serving.launch.flags import resolve_device
from eagle3_utils.states.dataset import PackedBatch
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.target import Target, load_target, load_tokenizer, stop_ids_of


@dataclass
class ServedPart:
    """The served runs over these prompts, or why there are none."""

    left_out: str | None = None
    runs: list[served.ServedRun] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)

    def text(self) -> str:
        """One line for the notebook."""
        return f"served evaluation left out: {self.left_out}" if self.left_out else f"{len(self.runs)} runs"

    def table(self) -> list[dict[str, Any]]:
        """`served.table`; empty when left out."""
        return served.table(self.runs) if self.runs else []

    def accept_lengths(self) -> dict[str, dict[str, Interval]]:
        """`counted` accept lengths by source of every shape, at its lowest concurrency; empty when left out."""
        found = {}
        for run in sorted(self.runs, key=lambda run: run.concurrency):
            if run.shape is not None and f"served {run.draft}" not in found:
                lengths = served.accept_lengths(run)
                found[f"served {run.draft}"] = {source: of["counted"] for source, of in lengths.items()}
        return found


class Evaluation:
    """What the stage works on: target, draft in float32, validation store, held-out prompts.

    Raises `UserError` when draft, store and target do not belong together.
    """

    def __init__(self, config: EvaluateConfig, stage: runs.Stage):
        self.config, self.stage = config, stage
        self.target: Target = load_target(config.model, config.trust_remote_code)
        self.tokenizer = load_tokenizer(self.target)
        self.device = resolve_device(config)
        self.draft_folder: Path = stage.data / "draft" / "export"
        self.reader = StoreReader(stage.data / "hidden_states" / "val")
        if tuple(self.reader.meta.aux_layers) != tuple(sorted(self.draft.config.aux_layers)):
            raise UserError(
                f"the draft takes layers {list(self.draft.config.aux_layers)}, "
                f"the store holds {self.reader.meta.aux_layers}", str(self.draft_folder), "train or extract again",
            )  # fmt: skip
        self.shape = TreeShape(config.num_steps, config.topk, config.num_draft_tokens)

    def __str__(self) -> str:
        draft = self.draft.config
        return (
            f"draft {self.draft_folder}: layers {list(draft.aux_layers)}, vocabulary {draft.draft_vocab_size:,} of "
            f"{draft.vocab_size:,}\n{len(self.reader)} validation samples; device {self.device}"
        )

    @cached_property
    def stop_ids(self) -> list[int]:
        """Tokens that end an answer."""
        return stop_ids_of(self.target, self.tokenizer)

    @cached_property
    def draft(self) -> DraftModel:
        """The exported draft, float32."""
        return load_draft(self.draft_folder, self.target, self.device, torch.float32)

    @cached_property
    def model(self):
        """The target in PyTorch, float32; loaded when first used."""
        return load_reference_model(self.target, torch.float32, self.device)

    @cached_property
    def teacher(self) -> Teacher:
        """The target's output head over the draft's vocabulary and the rest."""
        return Teacher.for_model(self.draft, self.target)

    def trained_draft(self) -> DraftModel:
        """The draft as training left it, not as it was exported: weights, vocabulary and shape of the training."""
        weights = self.stage.data / "draft" / BEST_WEIGHTS
        done = runs.read_done(self.stage.run_folder, TrainConfig.stage)
        if done is None or not weights.is_file():
            self.stage.log.warning("no training, or no %s: parity trusts the exported draft", weights)
            return self.draft
        config = TrainConfig.parse(done["config"] | {"model": self.config.model}, TrainConfig.stage)
        try:
            return draft_of_training(config, self.stage.data).place(self.device, torch.float32)
        except UserError as error:  # the draft that a warm start began with is gone, say
            self.stage.log.warning("parity trusts the exported draft: %s", error)
            return self.draft

    @cached_property
    def corpus(self) -> Path | None:
        """What the draft was trained on; None, said once, where it is not kept: states and draft are enough here."""
        path = self.stage.data / "corpus" / "train.parquet"
        if path.is_file():
            return path
        self.stage.log.warning("no %s: the baseline is 0, held-out prompts are not looked for in the corpus", path)
        return None

    def prompts(self, per_source: int, max_new_tokens: int) -> list[Prompt]:
        """Held-out prompts that leave room for an answer; `UserError` when the draft was trained on one of them."""
        room = min(self.config.max_seq_len, self.target.max_position_embeddings) - max_new_tokens
        paths = [runs.resolve_path(path) for path in self.config.prompts]
        return read_prompts(paths, self.tokenizer, per_source, room, self.config.prompt_sets, self.corpus)

    def teacher_forced(self) -> list[SampleCounts]:
        """Counts over the validation store."""
        baseline_id = offline.most_frequent_draft_id(self.draft, read_parquet(self.corpus)) if self.corpus else -1
        batches = offline.one_by_one(self.reader, self.config.max_val_samples, self.config.seed)
        total = min(len(self.reader), self.config.max_val_samples)
        progress = self._progress("teacher-forced", total)
        return offline.count_samples(
            self.draft, self.teacher, batches, self.config.num_offline_steps, baseline_id, progress
        )

    def decode_held_out(self) -> list[DecodedPrompt]:
        """Every held-out prompt decoded with the draft; none when ``reference_decoding`` is off."""
        config = self.config
        if not config.reference_decoding:
            return []
        prompts = self.prompts(config.prompts_per_source, config.max_new_tokens)
        progress, num_plain = self._progress("decoding", len(prompts)), config.plain_prompts_per_source
        return heldout.decode_prompts(
            self.model, self.draft, prompts, self.shape, config.max_new_tokens, self.stop_ids, num_plain, progress
        )

    def differences(self, decoded: Sequence[DecodedPrompt]) -> list[str]:
        """A line for every output token that is not plain greedy's; empty when decoding was lossless.

        Every output is checked against one forward without a cache, and token for token where it was decoded plainly.
        Raises `UserError` when one differs where the target's choice was clear.
        """
        lines = []
        for item in decoded:
            found = heldout.greedy_violations(self.model, item.prompt.input_ids, item.speculative.output_ids)
            for index, below in found:
                lines.append(f"{item.prompt.id}: token {index} is {below:.2g} below the best logit")
                if below > changes.ROUNDING:
                    raise UserError("speculative output is not plain greedy's", item.prompt.id, lines[-1])
            if not found and item.plain and item.plain.output_ids != item.speculative.output_ids:
                index = heldout.first_difference(item.plain.output_ids, item.speculative.output_ids)
                raise UserError(f"token {index} is not what plain decoding gives", item.prompt.id)
        return lines

    def teacher_forced_on(self, decoded: Sequence[DecodedPrompt]) -> list[SampleCounts]:
        """Counts over the decoded answers themselves, from the PyTorch target's states."""
        return offline.count_samples(
            self.draft, self.teacher, self._packed(decoded, self.draft.config.aux_layers), self.config.num_offline_steps
        )

    def replay_shapes(self, decoded: Sequence[DecodedPrompt]) -> dict[str, Interval]:
        """Accept length for every shape of ``config.replay_shapes``, found without the target.

        Over the decoded answers; where none were decoded, over validation samples and their stored states (texts that
        were sampled, not greedy ones).
        """
        batches = self._packed(decoded, self.draft.config.aux_layers)
        batches = batches or list(offline.one_by_one(self.reader, self.config.max_val_samples, self.config.seed))
        lengths = {}
        progress = self._progress("replay", len(self.config.replay_shapes))
        for number, numbers in enumerate(self.config.replay_shapes, start=1):
            shape = TreeShape(*numbers)
            accepted = heldout.replay_all(self.draft, batches, shape, whole=True)
            lengths[served.shape_name(shape)] = heldout.accept_length(accepted)
            progress(number)
        return lengths

    def serve(self) -> ServedPart:
        """SGLang without and with the draft; left out, with the reason, where there is no GPU."""
        left_out = served.why_not_served(self.config)
        if left_out:
            return ServedPart(left_out)
        for name in ("model", "teacher", "draft"):  # frees the GPU for the servers; loaded again when needed
            self.__dict__.pop(name, None)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        prompts = self.prompts(self.config.served_prompts_per_source, self.config.served_max_new_tokens)
        num_servers = len(self.config.server_urls) or 1 + len(self.config.served_shapes)
        progress = self._progress("served runs", num_servers * len(self.config.served_concurrency))
        found = served.serve(
            self.config, self.target, prompts, self.draft_folder, self.stage.folder,
            self.stage.log.info, progress,
        )  # fmt: skip
        lines = [json.dumps({"run": run.name} | asdict(answer)) for run in found for answer in run.answers]
        runs.write_text(self.stage.folder / "served.jsonl", "\n".join(lines) + "\n")
        return ServedPart(runs=found, prompts=prompts)

    def served_changes(self, served_part: ServedPart) -> list[dict[str, Any]]:
        """How many served answers the draft changed, beside how many change by batching alone, and why."""
        if served_part.left_out:
            return []
        model = rounded = None
        if self.config.reference_decoding:
            dtype = torch.bfloat16 if self.config.dtype == "auto" else getattr(torch, self.config.dtype)
            model, rounded = self.model, load_reference_model(self.target, dtype, self.device)
        return changes.explain(model, rounded, served_part.prompts, served_part.runs, self.stop_ids)

    def parity(self, served_part: ServedPart) -> parity.ParityReport:
        """Served acceptance beside that of the same tokens replayed here, diagnosed when they disagree."""
        left_out = served_part.left_out or (None if self.config.reference_decoding else "reference_decoding: off")
        drafting = [run for run in served_part.runs if run.shape is not None]
        run = min(drafting, key=lambda run: run.shape.topk, default=None)  # a chain is replayed at once, a tree slowly
        if left_out or run is None:
            return parity.ParityReport(left_out=left_out or "no server drafted")
        prompts = {prompt.id: prompt for prompt in served_part.prompts}
        answers = [answer for answer in run.answers if answer.histogram]
        if not answers:
            return parity.ParityReport(left_out="no served answer says what was accepted")

        @lru_cache(maxsize=1)  # most faults are of the same layers
        def batches_of(aux_layers: tuple[int, ...]) -> list[PackedBatch]:
            asked = [prompts[answer.prompt_id] for answer in answers]
            return forward.packed_samples(self.model, asked, [answer.output_ids for answer in answers], aux_layers)

        draft = self.trained_draft()
        accepted = heldout.replay_all(draft, batches_of(draft.config.aux_layers), run.shape)
        served_accepted = [answer.num_accepted for answer in answers]
        report = parity.compare(accepted, served_accepted, run.shape.num_steps, self.config.parity_tolerance)
        if report.passed and run.shape.topk > 1:
            return report
        return parity.diagnose(report, draft, self.target, batches_of, run.shape, served_accepted)

    def write_card(self) -> Path:
        """The model card beside the draft's weights, from the metrics of all stages done so far."""
        return card.write_card(self.draft_folder, self.stage.run_folder)

    def _packed(self, decoded: Sequence[DecodedPrompt], aux_layers: Sequence[int]) -> list[PackedBatch]:
        longer = [item for item in decoded if len(item.speculative.output_ids) > 1]
        if not longer:  # nothing to run the target for: it may be too large to be loaded here
            return []
        outputs = [item.speculative.output_ids for item in longer]
        return forward.packed_samples(self.model, [item.prompt for item in longer], outputs, aux_layers)

    def _progress(self, part: str, total: int) -> Callable[[int], None]:
        started = time.perf_counter()

        def report(done: int) -> None:
            rate = done / (time.perf_counter() - started)
            eta_seconds = (total - done) / rate if done else None
            self.stage.progress(done=done, total=total, unit=part, rate=rate, eta_seconds=eta_seconds, force=not done)

        return report
