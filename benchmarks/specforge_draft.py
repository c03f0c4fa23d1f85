"""A draft trained by SpecForge 0.2.0's own module on the states of one of our runs, ready for our stage 05.

    pip install --no-deps --target DIR specforge==0.2.0
    python benchmarks/specforge_draft.py parameters/smollm2-gpu.yaml --specforge DIR --lr 1.0e-3
    eagle3 run parameters/smollm2-gpu.yaml --only 05 --set shared.run_dir=outputs/smollm2-gpu-specforge

The parameters file is that of a run whose stages 01 to 03 are done. RUN-specforge is made a run folder of its own, with
links to the run's corpus and states, SpecForge's draft in data/draft/export, and its curves in data/draft; so the last
command measures it exactly as stage 05 measures ours, served too where there is a GPU.

SpecForge's: the draft module, its first weights, `OnlineEagle3Model` (unroll, loss and its mean over padded positions,
masks), weights 0.8^i, sample normaliser, padding, `TargetHead`, `TrainerCore`, `BF16Optimizer` (AdamW on float32
masters, clip 0.5, 1.5 % warm-up, cosine to 0), the exporter. Its default learning rate 1.0e-4 is meant for longer runs.

Ours: the shape (the target's, D, RoPE; plain EAGLE-3), the draft vocabulary (its rule, the most frequent supervised
tokens; ties and end tokens as in notebook 04), which samples make up each step (notebook 04's, every group padded to
its longest; with --batch-size N the same order, N at a time), the target's weights (SpecForge reads no tied head), the
loop, and the figures on the validation store, by which the best weights are kept, as in notebook 04.

Where it cannot be the same: SpecForge's mask also supervises two predictions beyond an answer's end, for which a store
has teachers only with `final: all`; else they are left out. --mask shifted supervises what ours does. On a CPU all is
float32 and not compiled, and the loss is SpecForge's own formula in place of its Triton kernel.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from eagle3_utils import runs
from eagle3_utils.config import TrainConfig, read_parameters, stage_parameters
from eagle3_utils.draft.check import check_draft
from eagle3_utils.draft.export import config_json
from eagle3_utils.draft.network import DraftConfig, DraftModel
from eagle3_utils.draft.training.batch_runner import BatchRunner
from eagle3_utils.draft.training.build import corpus_vocab, draft_config_for, token_counts
from eagle3_utils.draft.training.distributed import Ranks
from eagle3_utils.draft.training.journal import Journal
from eagle3_utils.draft.unrolling.teacher import Teacher
from eagle3_utils.errors import UserError
from eagle3_utils.lineage import stage_inputs
from eagle3_utils.states.dataset import PackedDataset
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.store import Sample
from eagle3_utils.target import Target, load_embed_tokens, load_lm_head, load_target

_AXES = {"input_ids": 1, "attention_mask": 1, "loss_mask": 1, "hidden_state": 1, "target": 1}


def main() -> None:
    args = _arguments()
    parameters = read_parameters(args.parameters, args.set)
    config = TrainConfig.parse(stage_parameters(parameters, TrainConfig.stage), str(args.parameters))
    on_cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    device, dtype = torch.device("cuda" if on_cuda else "cpu"), torch.bfloat16 if on_cuda else torch.float32
    attention = args.attention or ("flex_attention" if on_cuda else "sdpa")
    os.environ["SPECFORGE_DEVICE"] = device.type  # read when it is imported
    sys.path += [str(args.specforge)] if args.specforge else []
    torch._dynamo.config.disable = not on_cuda
    stage = open_run(config, args)
    target = load_target(config.model, config.trust_remote_code)
    reader = StoreReader(stage.data / "hidden_states" / "train")
    steps = Steps(reader, config, args, dtype)
    counts, all_counts = token_counts(reader, target)
    vocab = corpus_vocab(counts, target, config.draft_vocab_size, all_counts)
    shape = replace(draft_config_for(config, target, reader.meta.aux_layers), fc_norm=False, norm_output=False)
    config_path = stage.data / "draft" / "specforge.json"
    runs.write_json(config_path, draft_json(shape, target))
    model = DraftModel(shape, vocab, load_embed_tokens(target)).place(device, dtype)
    judge = BatchRunner(model, Teacher.for_model(model, target), config, int(counts.argmax()))
    val_reader = StoreReader(stage.data / "hidden_states" / "val")
    held_out = PackedDataset(val_reader, config.max_tokens_per_step, shuffle=False, prepare=judge.prepare)
    peer = Peer(config, target, model, config_path, attention, args.lr, steps.total)
    print(f"{steps.total} steps, {attention}, {dtype}, learning rate {args.lr:g}, mask {args.mask}", flush=True)
    best, seconds = train(peer, steps, stage, args.validate_every or config.validate_every_steps, judge, held_out)
    exported = peer.export(stage.data / "draft" / "export", best["weights"])
    print("\n".join(check_draft(exported, target, reader.meta.aux_layers)) or f"{exported}: nothing wrong with it")
    finish(stage, config, exported, best, steps, seconds)


def open_run(config: TrainConfig, args: argparse.Namespace) -> runs.Stage:
    """A run folder with links to the corpus and the states of the run, its finished stages, and stage 04 opened."""
    stage_inputs(config)  # stages 01 and 03 must be done
    source, data = runs.resolve_path(config.run_dir), runs.data_folder(config)
    out = args.out.resolve() if args.out else source.with_name(f"{source.name}-specforge")
    if out == source or (out.exists() and not (out / "data" / "corpus").is_symlink()):
        raise UserError("is a run of ours, which would be overwritten", str(out), "name another folder: --out")
    shutil.rmtree(out, ignore_errors=True)
    (out / "data").mkdir(parents=True)
    for name in ("corpus", "hidden_states"):
        (out / "data" / name).symlink_to(data / name)
    for done in ("01_merge_data", "03_extract_hidden_states"):
        shutil.copytree(source / done, out / done)
    changed = {"run_dir": str(out), "data_root": None, "init": "random", "learning_rate": args.lr}
    told = config.model_copy(update=changed | {"warmup_fraction": 0.015, "max_grad_norm": 0.5, "weight_decay": 0.0})
    return runs.open_stage(told, stage_inputs(told))


class Steps:
    """The padded batch of each optimiser step, its samples in notebook 04's order."""

    def __init__(self, reader: StoreReader, config: TrainConfig, args: argparse.Namespace, dtype: torch.dtype):
        self.per_step, self.batch_size = config.batches_per_step, args.batch_size
        self.dataset = PackedDataset(reader, config.max_tokens_per_step, config.seed, multiple_of=self.per_step)
        self.shift, self.dtype = args.mask == "shifted", dtype
        self.tokens = self.padded = 0
        whole = int(config.epochs)
        total = sum(len(self.of_epoch(epoch)) for epoch in range(whole))
        self.total = max(1, total + round((config.epochs - whole) * len(self.of_epoch(whole))))

    def of_epoch(self, epoch: int) -> list[list[int]]:
        """Reader indices of every step of an epoch."""
        plan, size = self.dataset.plan(epoch), self.per_step
        if self.batch_size:
            plan, size = [[index] for batch in plan for index in batch], self.batch_size
        return [list(chain.from_iterable(plan[start : start + size])) for start in range(0, len(plan), size)]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Batches, read one step ahead."""
        indices = chain.from_iterable(map(self.of_epoch, count()))
        with ThreadPoolExecutor(1, thread_name_prefix="batch-reader") as pool:
            coming = pool.submit(self._batch, next(indices))
            for _ in range(self.total):
                batch, coming = coming.result(), pool.submit(self._batch, next(indices))
                real = batch["attention_mask"]
                self.tokens, self.padded = self.tokens + int(real.sum()), self.padded + real.numel()
                yield batch

    def _batch(self, indices: list[int]) -> dict[str, torch.Tensor]:
        from specforge.algorithms.common.collation import pad_and_concatenate_features
        from specforge.algorithms.eagle3.data import build_offline_normalizer

        raw = [self._raw(self.dataset.reader.read(index)) for index in indices]
        features = list(map(build_offline_normalizer(self.dataset.max_tokens), raw))
        batch = pad_and_concatenate_features(features, sequence_axes=_AXES, required_keys=tuple(_AXES))
        return batch | {name: batch[name].to(self.dtype) for name in ("hidden_state", "target")}

    def _raw(self, sample: Sample) -> dict[str, torch.Tensor]:
        """A sample as in SpecForge's offline files; row r of its mask has row r + 1 of `hidden_state` as teacher."""
        mask, stored = torch.from_numpy(sample.loss_mask).long(), torch.from_numpy(sample.final_rows)
        if self.shift:
            mask = torch.cat([mask[2:], mask.new_zeros(2)])
        final = sample.aux.new_zeros(len(mask), sample.aux.shape[-1])
        final[stored] = sample.final
        return {
            "input_ids": torch.from_numpy(sample.input_ids).long(),
            "loss_mask": torch.cat([mask[:-1] * stored[1:], mask.new_zeros(1)]),
            "aux_hidden_state": sample.aux.flatten(1),
            "hidden_state": final,
        }


class Peer:
    """SpecForge's objects, put together as its `specforge train` does for one GPU in offline mode."""

    def __init__(self, config, target: Target, ours: DraftModel, config_path: Path, attention, lr, total_steps):
        import specforge.algorithms.eagle3.model as eagle3
        import specforge.modeling.draft  # noqa: F401  (registers the architecture)
        from specforge.core import loss
        from specforge.modeling.auto import AutoDraftModel, AutoDraftModelConfig
        from specforge.modeling.target.target_head import TargetHead
        from specforge.optimizer import BF16Optimizer
        from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
        from specforge.training.controller import TrainerCore
        from specforge.training.strategies.base import Eagle3TrainStrategy

        device, dtype = ours.fc.weight.device, ours.fc.weight.dtype
        if device.type == "cpu":
            eagle3.LogSoftmaxLoss = type("PlainLoss", (), {"apply": staticmethod(loss._compute_loss)})
        torch.manual_seed(config.seed)
        self.draft = AutoDraftModel.from_config(
            AutoDraftModelConfig.from_file(str(config_path)), attention_backend=attention, torch_dtype=dtype
        )
        head = TargetHead(str(target.path), trust_remote_code=config.trust_remote_code)
        with torch.no_grad():
            self.draft.d2t.copy_(ours.d2t)
            self.draft.t2d.copy_(ours.t2d)
            self.draft.embed_tokens.weight.copy_(load_embed_tokens(target))
            head.fc.weight.copy_(load_lm_head(target))
        self.draft.freeze_embedding()
        head.freeze_weights()
        model = eagle3.OnlineEagle3Model(self.draft, length=config.ttt_steps, attention_backend=attention)
        optimizer = partial(BF16Optimizer, lr=lr, total_steps=total_steps)
        backend = FSDPTrainingBackend(ParallelConfig(param_dtype=dtype), optimizer_factory=optimizer)
        backend.prepare_model(model.to(device, dtype), wrap=False, optimizer_target=self.draft).train()
        self.core = TrainerCore(Eagle3TrainStrategy(model, target_head=head.eval().to(device, dtype)), backend)

    def step(self, tensors: dict[str, torch.Tensor]) -> Any:
        """One optimiser step of SpecForge's trainer; its `StepResult`."""
        from specforge.runtime.contracts import TrainBatch

        return self.core.train_step(TrainBatch([], "eagle3", tensors, {"target_repr": "hidden_state"}))

    def weights(self) -> dict[str, torch.Tensor]:
        """What its exporter keeps of the draft: everything but the target's embeddings, on the CPU."""
        state = self.draft.state_dict()
        return {name: tensor.cpu().clone() for name, tensor in state.items() if "embed" not in name.lower()}

    def export(self, folder: Path, weights: dict[str, torch.Tensor]) -> Path:
        """As specforge/export/to_sglang.py, without the way through a pickled checkpoint; bf16."""
        from specforge.export.checkpoint_io import apply_legacy_rope_scaling
        from specforge.export.to_sglang import WEIGHT_MAPS, _serving_state

        half = {name: t.bfloat16() if t.is_floating_point() else t for name, t in weights.items()}
        state = _serving_state(half, WEIGHT_MAPS[type(self.draft).__name__])
        self.draft.to(torch.bfloat16).save_pretrained(folder, state_dict=state)
        apply_legacy_rope_scaling(str(folder))
        return folder


def draft_json(shape: DraftConfig, target: Target) -> dict[str, Any]:
    """The draft's config.json for SpecForge, to which `norm_output: false` would mean no norm before the head."""
    values = config_json(shape, target, "bfloat16")
    for name in ("norm_output", "fc_norm", "rope_scaling", "trained_aux_layers", "trained_with"):
        del values[name]
    text = target.text_config
    more = {"pad_token_id": text.get("pad_token_id") or 0, "initializer_range": text.get("initializer_range", 0.02)}
    return values | more


def train(
    peer: Peer, steps: Steps, stage: runs.Stage, every: int, judge: BatchRunner, held_out: PackedDataset
) -> tuple[dict[str, Any], float]:
    """All steps; returns the best validated weights with their figures and step, and the seconds of training."""
    best, seconds, began = {"accept_length": 0.0}, 0.0, time.perf_counter()
    with Journal(stage.data / "draft", stage.run_folder.name) as journal:
        for step, tensors in enumerate(steps, start=1):
            result = peer.step(tensors)
            loss, norm = float(result.loss), float(result.grad_norm)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise UserError(f"step {step}: loss {loss}, gradient norm {norm}", fix="lower --lr")
            journal.write("train", step, loss=loss, grad_norm=norm, tokens=steps.tokens)
            if step % every and step != steps.total:
                continue
            seconds += time.perf_counter() - began
            weights = peer.weights()
            judge.model.load_state_dict(weights)  # SpecForge's names are ours
            figures = judge.validate(held_out, Ranks(0, 1, judge.device), want_overlap=True).summary()
            journal.write("validation", step, **figures)
            length, rate = figures["accept_length"], steps.tokens / seconds
            print(f"step {step}: loss {loss:.3f}, accept length {length:.3f}, {rate:,.0f} tokens/s", flush=True)
            if length > best["accept_length"]:
                best = figures | {"weights": weights, "step": step}
            began = time.perf_counter()
    return best, seconds


def finish(stage: runs.Stage, config: TrainConfig, exported: Path, best: dict, steps: Steps, seconds: float) -> None:
    """Stage 04's metrics and DONE.json, and our run's own figures beside SpecForge's."""
    figures = {name: value for name, value in best.items() if name not in ("weights", "step")}
    report = {
        "steps": steps.total, "tokens": steps.tokens, "seconds": round(seconds, 1), "best_step": best["step"],
        "tokens_per_second": round(steps.tokens / seconds, 1), "validation": figures,
        "padded_per_token": round(steps.padded / steps.tokens, 3),
    }  # fmt: skip
    metrics = {
        "trained_by": "SpecForge 0.2.0", "validation_accuracy": figures["accuracy"],
        "baseline_accuracy": figures["baseline"][0], "accept_length": figures["accept_length"], "report": report,
    }  # fmt: skip
    stage.finish(metrics, {"draft": runs.hash_files([exported / "config.json", exported / "model.safetensors"])})
    ours = runs.read_json(runs.data_folder(config) / "draft" / "report.json")
    for name, row in {"specforge": report, "ours": ours}.items():
        if row:
            shown = {key: row[key] for key in ("steps", "tokens", "best_step", "seconds", "tokens_per_second")}
            shown |= {key: row["validation"][key] for key in ("accept_length", "accuracy")}
            print(json.dumps({"draft": name} | shown))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parameters", type=Path, help="the parameters file of the run")
    parser.add_argument("--set", action="append", default=[], help="stage.key=value, as eagle3 run takes it")
    parser.add_argument("--specforge", type=Path, help="where pip put it; left out: it is importable")
    parser.add_argument("--out", type=Path, help="run folder to make; default RUN-specforge")
    parser.add_argument("--lr", type=float, default=1e-4, help="peak learning rate; default SpecForge's")
    parser.add_argument("--batch-size", type=int, help="samples per step; default: those of our packed batches")
    parser.add_argument("--mask", choices=("own", "shifted"), default="own", help="shifted: the positions ours trains")
    parser.add_argument("--attention", choices=("flex_attention", "sdpa"), help="default flex_attention, sdpa on a CPU")
    parser.add_argument("--validate-every", type=int, help="steps; default: validate_every_steps")
    return parser.parse_args()


if __name__ == "__main__":
    main()
