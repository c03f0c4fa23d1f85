"""The probe's requests: what is sent to a capturing server, and which gate judges what comes back."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from eagle3_utils.config import ProbeConfig
from eagle3_utils.serving.client import Dump, DumpError
from eagle3_utils.serving.probing import gates, reference
from eagle3_utils.serving.probing.gates import Gate, Likeness, likeness
from eagle3_utils.serving.probing.pilot import run_pilot
from eagle3_utils.serving.server import RunningServer
from eagle3_utils.target import Target, load_embed_tokens, load_final_norm, load_lm_head

_ARRIVAL_SECONDS = 30.0  # after the answer; a GPU's first request may still compile kernels before it
_LAYER_PROBE_TOKENS = 256  # of one sample, for the comparison with the reference
_DENSE = Likeness(mean=0.99, low=0.9, stray=0.0)  # noise of another batch stays within
_MIXTURE = Likeness(mean=0.99, low=0.5, stray=0.01)  # some tokens change an expert with the batch they are in
_EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
_MOST_CUTS = 4  # compared: a large target's states of one sample take gigabytes in float32
_CPU_FULL_BATCH_TOKENS = 4096  # on a CPU a full batch of the longest sample would take minutes


class HasTokens(Protocol):
    """What the probe needs of a training record."""

    id: str
    input_ids: Sequence[int]


class Trials:
    """The gates in order, with the samples and dumps they share. Each adds to `gates`; none raises for a failure."""

    def __init__(
        self,
        server: RunningServer,
        target: Target,
        config: ProbeConfig,
        records: Sequence[HasTokens],
        log: Callable[[str], None],
    ):
        self.server, self.client, self.target, self.config, self.log = server, server.client, target, config, log
        self.records = records
        self.samples = random.Random(config.seed).sample(list(records), min(config.num_probe_samples, len(records)))
        self.longest = max(records, key=lambda record: len(record.input_ids))
        self.gates: list[Gate] = []
        self.layer_rows: list[dict] = []
        self.layer_cosines: dict[str, list[float]] = {}  # captured tensor → cosine with each boundary
        self.pilot: dict[str, Any] = {}
        self.dumps: dict[str, Dump] = {}
        self.longest_alone: Dump | None = None
        self.longest_in_batch: list[Dump] = []  # whole, or without its last token
        self.boundaries: list[int] = server.handshake["boundaries"]
        self.dtype = getattr(torch, server.handshake["dtype"])
        self._number = 0

    def add(self, gate: Gate) -> bool:
        self.gates.append(gate)
        self.log(f"{gate.verdict}  {gate.name}: {gate.measured} (wanted {gate.threshold})")
        return gate.passed

    def num_in_flight(self, longest: int) -> int:
        """Requests of up to `longest` tokens to keep in flight: dumps are taken after the answers, so they must fit.

        Half of staging, since slabs are rounded up and the groups of a data-parallel server may fill unevenly.
        """
        per_token = (len(self.boundaries) + 1) * self.target.hidden_size * self.dtype.itemsize + 8
        facts = self.server.handshake
        room = facts["max_bytes"] * facts["ranks"]["writers"] // 2 // (per_token * longest)
        return max(1, min(self.config.num_concurrent, room))

    def rid(self, kind: str) -> str:
        self._number += 1
        return f"hs-probe-{kind}-{self._number}"

    def identity(self) -> None:
        facts = self.server.handshake
        wanted = {"num_layers": self.target.num_layers, "hidden_size": self.target.hidden_size}
        wrong = [name for name, value in wanted.items() if facts[name] != value]
        measured = f"{facts['model_class']}, boundaries {self.boundaries} by {facts['method']}, pid {facts['pid']}"
        detail = ", ".join([*wrong, *filter(None, [self.server.suspicion])])
        self.add(Gate("identity", measured, "the handshake of this target's server", not wrong, detail))

    def arrival(self) -> bool:
        ids, rid = list(self.samples[0].input_ids), self.rid("arrival")
        started = time.monotonic()
        wanted = f"within {_ARRIVAL_SECONDS:.0f} s"
        try:
            self.client.capture(ids, rid, wait_seconds=_ARRIVAL_SECONDS)
        except DumpError as error:
            return self.add(Gate("dump arrives", "none", wanted, False, str(error)))
        return self.add(Gate("dump arrives", f"{time.monotonic() - started:.2f} s", wanted, True))

    def content(self) -> None:
        """Samples as they are, together with the shortest request there can be."""
        sequences = {self.rid("content"): list(sample.input_ids) for sample in self.samples}
        first = next(iter(sequences.values()))
        sequences[self.rid("one-token")] = first[:1]
        problems = []
        try:
            dumps = self.client.capture_many(sequences.items(), self.num_in_flight(max(map(len, sequences.values()))))
        except DumpError as error:
            self.add(Gate("ids, shapes, values", "a request failed", "0 problems", False, str(error)))
            return
        for rid, ids in sequences.items():
            problem = gates.content_problem(dumps[rid], ids, len(self.boundaries), self.target, self.dtype)
            if dumps[rid].metadata["nonce"] != self.server.handshake["nonce"]:
                problem = "the dump is of another server"
            if problem:
                problems.append(f"{rid}: {problem}")
        self.dumps = {sample.id: dump for sample, dump in zip(self.samples, dumps.values(), strict=False)}
        measured = f"{len(problems)} problems in {len(dumps)} dumps"
        self.add(Gate("ids, shapes, values", measured, "0 problems", not problems, "; ".join(problems[:3])))

    def quiet(self) -> None:
        """Ordinary requests and health checks leave nothing, and nothing unasked is there."""
        try:
            self.client.generate(list(self.samples[0].input_ids)[:16], max_new_tokens=2)
        except DumpError as error:
            self.add(Gate("nothing unasked", "an ordinary request failed", "0 files", False, str(error)))
            return
        self.client.is_healthy()
        time.sleep(0.2)
        files = [path.name for path in self.server.dump_dir.iterdir() if not path.name.startswith("handshake")]
        self.add(Gate("nothing unasked", f"{len(files)} files", "0 files", not files, ", ".join(sorted(files)[:3])))

    def logprobs(self) -> None:
        """The served log-probabilities, rebuilt from the dumped final state and the checkpoint's own lm_head."""
        model_dtype = getattr(torch, self.server.handshake["model_dtype"])
        lm_head = load_lm_head(self.target)
        errors = []
        try:
            for sample in self.samples:
                ids = list(sample.input_ids)
                dump, answer = self.client.capture(ids, self.rid("logprobs"), return_logprob=True, logprob_start_len=0)
                served = [value for value, _id, _text in answer["meta_info"]["input_token_logprobs"][1:]]
                if len(served) != len(ids) - 1:
                    raise DumpError(f"{len(served)} log-probabilities for {len(ids)} tokens")
                ids = dump.input_ids
                errors.append(gates.logprob_errors(dump.final, ids, served, lm_head, self.target, model_dtype))
        except DumpError as error:
            self.add(Gate("log-probabilities rebuilt", "a request failed", "-", False, str(error)))
            return
        all_errors = torch.cat(errors)
        mean, high = float(all_errors.mean()), float(all_errors.quantile(0.99))
        limit = self.config.max_logprob_error
        measured = f"mean error {mean:.5f}, 99th percentile {high:.5f} over {len(all_errors)} tokens"
        passed = mean <= limit and high <= 10 * limit
        self.add(Gate("log-probabilities rebuilt", measured, f"≤ {limit}, ≤ {10 * limit}", passed))

    def layers(self) -> None:
        """Which layer each tensor really is: against Hugging Face where it fits, and against an all-boundaries dump."""
        ids = list(self.samples[0].input_ids)[:_LAYER_PROBE_TOKENS]
        hidden = self._reference(ids)
        try:
            if hidden is not None:
                dump, _ = self.client.capture(ids, self.rid("layers"))
                captured = torch.cat([dump.aux, dump.final[:, None]], dim=1)
                expected = [*self.boundaries, self.target.num_layers]
                labels = [f"aux[{i}]" for i in range(len(self.boundaries))] + ["final"]
                cosines = gates.match_boundaries(captured, hidden)
                gate, self.layer_rows = gates.layer_gate(
                    "layers against Hugging Face", cosines, expected, self.config.min_layer_cosine, labels
                )
                self.layer_cosines = dict(zip(labels, cosines.tolist(), strict=True))
                self.add(gate)
            if hidden is None or self.config.reference == "auto":
                self._anchored(ids, is_the_gate=hidden is None)
        except DumpError as error:
            self.add(Gate("layers found by value", "a request failed", "-", False, str(error)))

    def _reference(self, ids: list[int]) -> torch.Tensor | None:
        """Hugging Face's boundaries [T, n + 1, H]; None when they are not wanted, or `auto` cannot have them."""
        wanted = self.config.reference
        if wanted == "anchored" or (wanted == "auto" and not reference.fits_in_memory(self.target)):
            return None
        try:
            return reference.huggingface_boundaries(self.target, ids)
        except (ImportError, OSError, ValueError, KeyError, RuntimeError) as error:
            if wanted == "huggingface":
                raise
            self.log(f"transformers cannot run this checkpoint here, the anchored check is the gate: {error}")
            return None

    def _anchored(self, ids: list[int], is_the_gate: bool) -> None:
        per_token = (self.target.num_layers + 1 + len(self.boundaries) + 1) * self.target.hidden_size * 2 + 8
        ids = ids[: max(2, self.server.handshake["max_bytes"] // 2 // per_token)]  # it holds every boundary
        dump, _ = self.client.capture(ids, f"hs-all-{self.rid('anchored')}")
        rows = load_embed_tokens(self.target)[torch.tensor(ids)]
        self.add(gates.anchor_gate(dump.hidden, dump.final, rows, load_final_norm(self.target), self.target))
        cosines = gates.match_boundaries(dump.aux, dump.hidden)
        gate, found = gates.layer_gate("layers against all boundaries", cosines, self.boundaries, 0.9999)
        self.add(gate)
        if is_the_gate:
            self.layer_rows = found
            self.layer_cosines = {row["tensor"]: line for row, line in zip(found, cosines.tolist(), strict=True)}

    def invariance(self) -> None:
        """One sequence alone, twice in a row, inside a full batch of others, and in pieces: the same states."""
        ids = list(self.samples[0].input_ids)
        limits = _MIXTURE if any(self.target.text_config.get(key) for key in _EXPERT_KEYS) else _DENSE
        wanted = f"≥ {limits.mean}, ≥ {limits.low}, ≤ {limits.stray:.0%}"
        figures: dict[str, Likeness] = {}
        count = self.num_in_flight(len(ids))
        try:
            alone, _ = self.client.capture(ids, self.rid("alone"))
            again, _ = self.client.capture(ids, self.rid("again"))
            figures["twice"] = likeness(again, alone)
            dumps = self.client.capture_many(self._batch_of(ids, count), count)
            figures[f"in a batch of {count}"] = Likeness.worst(
                likeness(dump, alone) for rid, dump in dumps.items() if "batch" in rid
            )
            among = []
            for sample in self.samples[1:4]:  # other neighbours, other places in the batch
                other, _ = self.client.capture(list(sample.input_ids), self.rid("other"))
                if sample.id in self.dumps:
                    among.append(likeness(self.dumps[sample.id], other))
            if among:
                figures["among others"] = Likeness.worst(among)
        except DumpError as error:
            self.add(Gate("invariance", "a request failed", wanted, False, str(error)))
            return
        cut, chunk = self._cut_otherwise(), self.server.handshake["chunked_prefill_size"] or 0
        untested = not cut and 0 < chunk < len(self.longest.input_ids)  # which extraction cuts; shorter ones by chance
        if cut:
            figures["in pieces"] = Likeness.worst(cut.values())
        detail = ", ".join(f"{name} {figure.mean:.5f}" for name, figure in figures.items())
        detail += f"; the longest sample cut {len(cut)} ways: {', '.join(cut)}" if cut else ""
        worst = Likeness.worst(figures.values())
        measured = worst.text + ("" if cut else "; NOT TESTED in pieces: nothing was cut (lower chunked_prefill_size)")
        self.add(Gate("invariance", measured, wanted, worst.within(limits) and not untested, detail))

    def _batch_of(self, ids: list[int], count: int) -> list[tuple[str, list[int]]]:
        """A batch in which every fourth request is `ids`; the others are the same tokens in other orders."""
        rng, batch = random.Random(self.config.seed), []
        for number in range(count):
            kind, sequence = ("batch", ids) if number % 4 == 0 else ("neighbour", rng.sample(ids, len(ids)))
            batch.append((self.rid(kind), sequence))
        return batch

    def _cut_otherwise(self) -> dict[str, Likeness]:
        """Copies of the longest sample that chunked prefill cut at other places than the one alone, by their pieces."""
        alone, found = self.longest_alone, {}
        for dump in self.longest_in_batch:
            pieces = dump.metadata.get("pieces", "")  # of an older capture in a user's server: unknown
            if "," in pieces and pieces not in (alone.metadata["pieces"], *found) and len(found) < _MOST_CUTS:
                rows = len(dump.final)  # a causal model: what follows does not matter
                found[pieces] = likeness(dump, replace(alone, aux=alone.aux[:rows], final=alone.final[:rows]))
        return found

    def capacity(self) -> None:
        """The longest sample of the corpus, then as many of them at once as fit the server's running batch."""
        longest = list(self.longest.input_ids)
        limit = self.config.max_seq_len
        if len(longest) > limit:
            fix = f"the corpus was cut longer than max_seq_len {limit}"
            self.add(Gate("capacity", f"longest sample {len(longest)} tokens", f"≤ {limit}", False, fix))
            return
        count = self.num_in_flight(len(longest))
        if self.server.handshake["device"] == "cpu":
            count = min(count, max(2, _CPU_FULL_BATCH_TOKENS // len(longest)))
        staging, writers = self.server.handshake["max_bytes"], self.server.handshake["ranks"]["writers"]
        try:
            dump, _ = self.client.capture(longest, self.rid("longest"))
            problem = gates.content_problem(dump, longest, len(self.boundaries), self.target, self.dtype)
            # Of two lengths, or a chunk size that is a multiple of the one would never cut any of them.
            batch = [(self.rid("full"), longest[: len(longest) - number % 2] or longest) for number in range(count)]
            self.longest_alone, self.longest_in_batch = dump, [*self.client.capture_many(batch, count).values()]
        except DumpError as error:
            self.add(Gate("capacity", "a request failed", "every dump arrives", False, str(error)))
            return
        size = sum(tensor.numel() * tensor.element_size() for tensor in (dump.aux, dump.final, dump.input_ids))
        room = staging // size
        measured = f"{len(longest)} tokens, {size / 1e6:.1f} MB a dump, {count} at once; staging holds {room}"
        passed = problem is None and room >= 4
        detail = problem or ("" if passed else f"set staging_max_bytes to {4 * size * writers:,} or more")
        self.add(Gate("capacity", measured, "every dump arrives, staging holds ≥ 4", passed, detail))

    def rate(self) -> None:
        records = random.Random(self.config.seed + 1).sample(
            list(self.records), min(self.config.num_pilot_samples, len(self.records))
        )
        try:
            sequences = [list(record.input_ids) for record in records]
            self.pilot = run_pilot(self.client, sequences, self.num_in_flight(max(map(len, sequences))))
        except DumpError as error:
            self.add(Gate("rate", "a request failed", "> 0", False, str(error)))
            return
        pilot = self.pilot
        measured = (
            f"{pilot['tokens_per_second']:,.0f} tokens/s ({pilot['tokens_per_second_low']:,.0f}-"
            f"{pilot['tokens_per_second_high']:,.0f}), {pilot['bytes_per_second'] / 1e6:,.1f} MB/s"
        )
        self.add(Gate("rate", measured, "> 0", pilot["tokens_per_second"] > 0, f"{pilot['num_samples']} samples"))
