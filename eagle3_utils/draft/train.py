"""Train a draft on stored hidden states; resumable, on one process or under torchrun.

    python -m eagle3_utils.draft.train outputs/RUN/04_train_draft/parameters.yaml
    torchrun --nproc-per-node 8 -m eagle3_utils.draft.train outputs/RUN/04_train_draft/parameters.yaml

One optimiser step takes `batches_per_step` packed batches, shared out over the ranks. The loss of step i of the
unroll is divided by the supervised positions of the *whole* optimiser step, so ranks and accumulation change nothing
but rounding. SIGTERM and SIGINT end the step at hand, write a checkpoint and stop; torchrun kills ranks that take more
than 30 s for it.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import yaml

from eagle3_utils.config import TrainConfig
from eagle3_utils.draft.metrics import StepCounts
from eagle3_utils.draft.network import DraftModel
from eagle3_utils.draft.training import build
from eagle3_utils.draft.training.batch_runner import BatchRunner, PlannedBatch
from eagle3_utils.draft.training.checkpoint import (
    BEST_WEIGHTS,
    Position,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    save_weights,
)
from eagle3_utils.draft.training.distributed import Ranks, open_ranks
from eagle3_utils.draft.training.folder import (
    CHECKPOINTS,
    REPORT,
    checkpoint_to_go_on_from,
    keep_finished,
    sole_training,
)
from eagle3_utils.draft.training.journal import Journal
from eagle3_utils.draft.training.optimizer import MasterAdamW, cosine_with_warmup
from eagle3_utils.draft.training.pace import Pace, progress_of
from eagle3_utils.draft.training.schedule import StepSchedule
from eagle3_utils.draft.training.signals import StopRequest
from eagle3_utils.draft.training.splits import open_splits
from eagle3_utils.draft.unrolling.teacher import Teacher
from eagle3_utils.errors import UserError
from eagle3_utils.runs import config_values, data_folder, write_json
from eagle3_utils.target import load_target

# Parameters that do not change what is learnt (beyond rounding): a run may be resumed with others.
_FREE = ("device", "num_gpus", "sharding", "validate_every_steps", "checkpoint_every_steps", "keep_checkpoints",
         "max_nonfinite_in_a_row", "prefetch_batches", "max_rows_at_once", "frozen_on_host", "model", "more_data",
         "trust_remote_code")  # fmt: skip


@dataclass
class TrainReport:
    """What came of it. validation: `StepCounts.summary()` of the best weights, `baseline` in it; seconds of training
    steps, interrupted runs counted in; wait_share: part of them spent waiting for data."""

    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    wait_share: float
    best_step: int
    validation: dict


def train(
    config: TrainConfig,
    log: logging.Logger | None = None,
    progress: Callable[..., None] | None = None,
    ranks: Ranks | None = None,
) -> tuple[DraftModel, TrainReport]:
    """Train to the end, from the newest whole checkpoint if there is one.

    Reads `hidden_states/{train,val}` under the run's data folder, writes `draft/`; where training begins anew, a
    finished draft is kept as `draft.old` (or `draft.old-2` …). progress: called with done, total, unit, rate and more,
    as `Stage.progress`. Returns the best model by validated accept length.
    Raises `UserError` when another training is at work there, on parameters that differ from an unfinished training's,
    and on too many non-finite steps in a row; KeyboardInterrupt after a signal, once the checkpoint is written.
    """
    if ranks is None:
        with open_ranks(config.device) as ranks:
            return train(config, log, progress, ranks)
    if config.batches_per_step % ranks.num_ranks:
        raise UserError(f"batches_per_step {config.batches_per_step} is no multiple of {ranks.num_ranks} ranks")
    with sole_training(data_folder(config) / "draft", ranks):
        trainer = Trainer(config, ranks, log or logging.getLogger("eagle3.train"), progress or (lambda **fields: None))
        with StopRequest() as stop:
            return trainer.run(stop)


class Trainer:
    """State of one training run on one rank."""

    def __init__(self, config: TrainConfig, ranks: Ranks, log: logging.Logger, progress: Callable[..., None]):
        self.config, self.ranks, self.log, self.progress = config, ranks, log, progress
        self.sharded = config.sharding == "fsdp" and ranks.num_ranks > 1
        self.folder = data_folder(config) / "draft"
        self.target = load_target(config.model, config.trust_remote_code)
        train_data, self.val_data = open_splits(config, ranks)
        reader = train_data.reader
        self.schedule = StepSchedule(train_data, config.batches_per_step // ranks.num_ranks, config.epochs)
        self.total_steps = self.schedule.total_steps()
        counts, all_counts = build.token_counts(reader, self.target)
        vocab = build.corpus_vocab(counts, self.target, config.draft_vocab_size, all_counts)
        wanted = self._decisive() | {"states": reader.content_hash()} | build.init_from_hash(config)
        found = checkpoint_to_go_on_from(self.folder, wanted, log)
        start = build.without_lost_init_from(config, self.folder) if found else config
        rms = build.typical_rms(reader)
        self.model = build.new_draft(start, self.target, reader.meta.aux_layers, vocab, rms).place(
            ranks.device, torch.bfloat16 if ranks.device.type == "cuda" else torch.float32, config.frozen_on_host
        )
        if self.sharded:
            ranks.shard(self.model)
        self.optimizer = MasterAdamW(
            self.model.parameters(), config.weight_decay, config.max_grad_norm,
            sum_over_ranks=ranks.sum if self.sharded else None,
        )  # fmt: skip
        self.position = Position(parameters=wanted)
        self._begin(found)
        teacher = Teacher.for_model(self.model, self.target, config.frozen_on_host)
        self.runner = BatchRunner(self.model, teacher, config, int(counts.argmax()))
        train_data.prepare = self.val_data.prepare = self.runner.prepare
        self.nonfinite_in_a_row = 0

    def run(self, stop: StopRequest) -> tuple[DraftModel, TrainReport]:
        """Loop over optimiser steps; see `train`."""
        config, position = self.config, self.position
        journal = Journal(self.folder, Path(config.run_dir).name) if self.ranks.is_first else None
        first_step = position.step + 1
        self.pace = Pace(position)
        try:
            if journal is not None and position.step < self.total_steps:
                (self.folder / REPORT).unlink(missing_ok=True)  # not finished: see folder.py
            if position.step and self._is_due(config.validate_every_steps):  # checkpoints are written before it
                self._validate(journal)
            for batches, waited in self.schedule.steps(position, self.total_steps):
                began = time.perf_counter()
                entry = self._optimise(batches)
                seconds = waited + time.perf_counter() - began
                position.seconds += seconds
                position.waited += waited
                if self.ranks.is_first and position.step == first_step:
                    self.log.info("first step, compilation included: %.1f s", seconds)
                self._tell(journal, entry)
                stopping = self._is_stopping(stop)
                if stopping or self._is_due(config.checkpoint_every_steps):
                    self._save()
                if stopping:
                    self.log.info("stopped by a signal at step %d of %d; run it again", position.step, self.total_steps)
                    raise KeyboardInterrupt
                if self._is_due(config.validate_every_steps):
                    self._validate(journal)
            result = self._finish(journal)
            if self._is_stopping(stop):
                raise KeyboardInterrupt
            return result
        finally:
            if journal is not None:
                journal.close()

    def _is_due(self, every_steps: int) -> bool:
        return self.position.step == self.total_steps or self.position.step % every_steps == 0

    def _is_stopping(self, stop: StopRequest) -> bool:
        """Whether a signal reached any rank."""
        return bool(self.ranks.sum(torch.tensor(float(stop.requested))) > 0)

    def _optimise(self, batches: list[PlannedBatch]) -> dict:
        """One optimiser step over this rank's batches."""
        tokens = float(sum(batch.packed.num_tokens for batch in batches))
        local = torch.stack([batch.num_supervised for batch in batches]).sum(0)
        summed = self.ranks.sum(torch.cat([local, torch.tensor([tokens], dtype=torch.float64)]))
        supervised, tokens = summed[:-1], int(summed[-1])
        self.optimizer.zero_grad()
        loss, counts = 0.0, StepCounts.zeros(self.config.ttt_steps, self.ranks.device)
        for batch in batches:
            result = self.runner(batch, supervised)
            result.loss.backward()
            loss, counts = loss + result.loss.detach(), counts + result.counts
        if not self.sharded:
            self.ranks.sum_gradients(self.optimizer.parameters)
        reduced = self.ranks.sum(torch.cat([counts.as_tensor().flatten(), loss.double().view(1)])).cpu()
        loss, grad_norm = float(reduced[-1]), self.optimizer.grad_norm()
        peak, warmup = self.config.learning_rate, self.config.warmup_fraction
        rate = cosine_with_warmup(self.position.step, self.total_steps, peak, warmup)
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.optimizer.step(rate, grad_norm)
            self.nonfinite_in_a_row = 0
        else:
            self._skip(batches, loss, grad_norm)
        self.position.step += 1
        self.position.step_in_epoch += 1
        self.position.tokens += tokens
        figures = StepCounts.from_tensor(reduced[:-1].view(-1, self.config.ttt_steps)).summary()
        kept = {name: figures[name] for name in ("accuracy", "accept_length")} | {"loss_by_step": figures["loss"]}
        return {"loss": loss, "grad_norm": grad_norm, "learning_rate": rate, "tokens": self.position.tokens, **kept}

    def _skip(self, batches: list[PlannedBatch], loss: float, grad_norm: float) -> None:
        """A step that is not finite changes no weight, is named in the log, and stops the run when it repeats."""
        self.nonfinite_in_a_row += 1
        samples = [sample for batch in batches for sample in batch.packed.sample_ids]
        self.log.error(
            "step %d skipped: loss %s, gradient norm %s; samples %s", self.position.step, loss, grad_norm, samples
        )
        if self.nonfinite_in_a_row >= self.config.max_nonfinite_in_a_row:
            raise UserError(
                f"{self.nonfinite_in_a_row} steps in a row were not finite; last samples: {', '.join(samples[:5])} …",
                str(self.folder),
                "lower learning_rate, or look for non-finite states: notebook 06",
            )

    def _validate(self, journal: Journal | None) -> None:
        figures = self.runner.validate(self.val_data, self.ranks).summary()
        if figures["accept_length"] > self.position.best_accept_length:
            self.position.best_step, self.position.best_accept_length = self.position.step, figures["accept_length"]
            save_weights(self.folder / BEST_WEIGHTS, self.model, self.ranks)
        if journal is not None:
            journal.write("validation", self.position.step, **figures)
            accuracy = " ".join(f"{value:.3f}" for value in figures["accuracy"])
            self.log.info(
                "step %d validation: accuracy by step %s (baseline %.3f), accept length %.3f",
                self.position.step, accuracy, figures["baseline"][0], figures["accept_length"],
            )  # fmt: skip

    def _finish(self, journal: Journal | None) -> tuple[DraftModel, TrainReport]:
        """The best weights, validated once more with overlap."""
        if self.position.best_step >= 0:
            load_weights(self.folder / BEST_WEIGHTS, self.model)
        figures = self.runner.validate(self.val_data, self.ranks, want_overlap=True).summary()
        if journal is not None:
            journal.write("best", self.position.best_step, **figures)
        tokens, seconds = self.position.tokens, self.position.seconds  # none in a checkpoint of an older version
        report = TrainReport(
            steps=self.position.step,
            tokens=tokens,
            seconds=round(seconds, 1),
            tokens_per_second=round(tokens / seconds, 1) if seconds else 0.0,
            wait_share=round(self.position.waited / seconds, 4) if seconds else 0.0,
            best_step=self.position.best_step,
            validation=figures,
        )
        if journal is not None:
            write_json(self.folder / REPORT, asdict(report))
        return self.model, report

    def _tell(self, journal: Journal | None, entry: dict) -> None:
        """Progress and one journal entry of the step just taken."""
        if journal is None:
            return
        entry = entry | self.pace.figures(self.position, self.total_steps)
        self.progress(**progress_of({"step": self.position.step} | entry))
        journal.write("train", self.position.step, **entry)

    def _save(self) -> None:
        folder = self.folder / CHECKPOINTS
        save_checkpoint(folder, self.model, self.optimizer, self.position, self.config.keep_checkpoints, self.ranks)

    def _decisive(self) -> dict:
        """Parameters that decide what is learnt."""
        return {key: value for key, value in config_values(self.config).items() if key not in _FREE}

    def _begin(self, found: tuple[Path, Position] | None) -> None:
        """Go on from a checkpoint, whose vocabulary is kept, or anew where there is none; see folder.py."""
        if found is None:
            keep_finished(self.folder, self.ranks, self.log)
            return
        path, self.position = found
        load_checkpoint(path, self.model, self.optimizer)
        self.log.info("resumed from %s: step %d, epoch %d", path, self.position.step, self.position.epoch)


def main() -> None:
    """Train from a flat parameters file, as the notebook saves it; what torchrun starts on every rank."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m eagle3_utils.draft.train PARAMETERS.yaml")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    path = Path(sys.argv[1])
    try:
        _, report = train(TrainConfig.parse(yaml.safe_load(path.read_text()), str(path)))
    except UserError as error:
        sys.exit(f"eagle3: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    logging.getLogger("eagle3.train").info("%s", report)


if __name__ == "__main__":
    main()
