"""Acceptance and speed as SGLang serves them: the same prompts without the draft and with it.

    runs = serve(config, target, prompts, draft_folder, stage.folder, log=stage.log.info)
    table(runs)                          # one row per (shape, concurrency)

Servers are started here, or are those of ``server_urls``, which say themselves what draft they serve (`/server_info`).

Accept length, three ways, all with the bonus token: `total` = Σ completion tokens / Σ verifications (what SGLang calls
`spec_accept_length`, summed over requests), `per_request` = the mean of that ratio over requests, and `counted` =
1 + Σ accepted drafts / Σ verifications from `spec_correct_drafts_histogram`. The first two count the token that prefill
gives and lose drafts accepted beyond a stop, so `counted` is the one to compare with other ways of measuring.

Needs a GPU: EAGLE3 in SGLang 0.5.14 runs CUDA kernels. Fields of `meta_info`: tokenizer_manager.py there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_utils.acceptance.heldout import accept_length, acceptance_by_position
from eagle3_utils.acceptance.intervals import ALL, Interval, ratio_interval
from eagle3_utils.acceptance.prompt_sets import Prompt
from eagle3_utils.acceptance.tree import TreeShape
from eagle3_utils.config import EvaluateConfig
from eagle3_utils.errors import UserError
from eagle3_utils.serving.client import Client
from eagle3_utils.serving.launch.flags import resolve_device
from eagle3_utils.serving.server import AttachedServer, Server
from eagle3_utils.target import Target

NO_DRAFT = "no draft"
_WARM_UP_TOKENS = 16
_LEAST_SECONDS, _MOST_ROUNDS = 10.0, 3


@dataclass(frozen=True)
class ServedAnswer:
    """One answer. ``histogram[i]``: its verifications that accepted i draft tokens; empty without a draft."""

    prompt_id: str
    source: str
    output_ids: list[int]
    completion_tokens: int
    verifications: int
    histogram: list[int]
    latency_seconds: float
    cached_tokens: int = 0  # prompt tokens a prefix cache spared the server

    @property
    def num_accepted(self) -> list[int]:
        """Draft tokens accepted per verification, in no particular order."""
        return [accepted for accepted, count in enumerate(self.histogram) for _ in range(count)]


@dataclass(frozen=True)
class ServedRun:
    """All answers of one server at one concurrency."""

    draft: str  # NO_DRAFT, or the shape as "3 · 1 · 4"
    shape: TreeShape | None
    concurrency: int
    wall_seconds: float
    answers: list[ServedAnswer]

    @property
    def name(self) -> str:
        return f"{self.draft}, {self.concurrency} in flight"

    @property
    def tokens_per_second(self) -> float:
        return sum(answer.completion_tokens for answer in self.answers) / self.wall_seconds

    @property
    def milliseconds_per_pass(self) -> float:
        """Latency over the target's decoding passes: verifications, or tokens without a draft. Prefill is in it."""
        passes = sum(answer.verifications or answer.completion_tokens for answer in self.answers)
        return 1e3 * sum(answer.latency_seconds for answer in self.answers) / passes

    def latency_seconds(self, percentile: float) -> float:
        """Of a whole answer, at a percentile over requests."""
        return float(np.percentile([answer.latency_seconds for answer in self.answers], percentile))


def why_not_served(config: EvaluateConfig) -> str | None:
    """Why the served part is left out, None when it is to run. Raises `UserError` for ``served: on`` without a GPU."""
    if config.served == "off":
        return "served: off"
    if config.server_urls or resolve_device(config) == "cuda":
        return None
    if config.served == "on":
        raise UserError("EAGLE3 serving needs a CUDA GPU, and there is none", "served: on", "use served: auto or off")
    return "no CUDA GPU here; SGLang's EAGLE3 runs CUDA kernels only"


def shape_name(shape: TreeShape | None) -> str:
    """The shape as "steps · topk · draft tokens"."""
    return f"{shape.num_steps} · {shape.topk} · {shape.num_draft_tokens}" if shape else NO_DRAFT


def speculative_flags(draft_folder: Path, shape: TreeShape) -> list[str]:
    """SGLang's flags for an EAGLE-3 draft and a tree."""
    return [
        "--speculative-algorithm", "EAGLE3",
        "--speculative-draft-model-path", str(draft_folder),
        "--speculative-num-steps", str(shape.num_steps),
        "--speculative-eagle-topk", str(shape.topk),
        "--speculative-num-draft-tokens", str(shape.num_draft_tokens),
    ]  # fmt: skip


def serve(
    config: EvaluateConfig,
    target: Target,
    prompts: Sequence[Prompt],
    draft_folder: Path,
    folder: Path,
    log: Callable[[str], None] = print,
    progress: Callable[[int], None] = lambda num_runs: None,
) -> list[ServedRun]:
    """Measure every concurrency on a server without the draft and on one per shape, one server after the other.

    ``progress`` is called with the number of runs done.
    """
    found: list[ServedRun] = []
    progress(0)
    for shape, client in _servers(config, target, draft_folder, folder, log):
        for concurrency in config.served_concurrency:
            name = shape_name(shape)
            found.append(measure(client, prompts, config.served_max_new_tokens, concurrency, name, shape))
            log(f"{found[-1].name}: {found[-1].tokens_per_second:,.0f} tokens/s")
            progress(len(found))
    return found


def _servers(
    config: EvaluateConfig, target: Target, draft_folder: Path, folder: Path, log: Callable[[str], None]
) -> Iterator[tuple[TreeShape | None, Client]]:
    """The user's servers, else one without the draft and one per shape of ``config.served_shapes``.

    Those started here have the same flags but for the draft: no prefix cache, CUDA graphs up to the largest
    concurrency.
    """
    for url in config.server_urls:
        server = AttachedServer(url, None, target, None)
        try:
            yield shape_served(server.client.get_json("/server_info"), draft_folder, log), server.client
        finally:
            server.client.close()
    if config.server_urls:
        return
    most = max(config.served_concurrency)
    common = ["--disable-radix-cache", "--cuda-graph-max-bs-decode", str(most)]
    common += [] if config.max_running_requests else ["--max-running-requests", str(most)]
    for shape in (None, *(TreeShape(*numbers) for numbers in config.served_shapes)):
        flags = common + (speculative_flags(draft_folder, shape) if shape else [])
        log_path, started = folder / f"server-{shape_name(shape).replace(' ', '')}.log", time.perf_counter()
        with Server(config, target, log_path, folder, extra_args=flags) as server:
            log(f"{shape_name(shape)}: the server is ready after {time.perf_counter() - started:.0f} s")
            yield shape, server.client


def shape_served(info: dict[str, Any], draft_folder: Path, log: Callable[[str], None] = print) -> TreeShape | None:
    """The tree a running server drafts, from its `/server_info`; None without a draft.

    Raises `UserError` when it drafts by another algorithm than EAGLE3.
    """
    algorithm = info.get("speculative_algorithm")
    if algorithm is None:
        return None
    if str(algorithm).upper() != "EAGLE3":
        raise UserError(f"the server drafts with {algorithm}, not with EAGLE3", "server_urls")
    served_from = str(info.get("speculative_draft_model_path"))
    if Path(served_from).resolve() != draft_folder.resolve():
        log(f"this server's draft is {served_from}; the run's own is {draft_folder}")
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    return TreeShape(*(int(info[name]) for name in names))


def measure(
    client: Client,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    concurrency: int,
    draft: str = NO_DRAFT,
    shape: TreeShape | None = None,
    **sampling: Any,
) -> ServedRun:
    """Answer all prompts greedily, ``concurrency`` at a time, after a warm-up that is not counted.

    The warm-up asks every prompt for a few tokens at the same concurrency, so that what a server compiles when it
    first sees a length or batch size is over before the clock starts. A run of less than ten seconds is timed up to
    three times: its time is the mean, its answers are the first.
    ``sampling``: further sampling parameters of SGLang (``ignore_eos=True``, …).
    """

    def ask(prompt: Prompt, num_tokens: int = max_new_tokens) -> ServedAnswer:
        started = time.perf_counter()
        body = client.generate(prompt.input_ids, max_new_tokens=num_tokens, sampling_params=sampling)
        return parse_answer(prompt, body, time.perf_counter() - started)

    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(lambda prompt: ask(prompt, min(_WARM_UP_TOKENS, max_new_tokens)), prompts))
        rounds, seconds = [], []
        while not rounds or (sum(seconds) < _LEAST_SECONDS and len(rounds) < _MOST_ROUNDS):
            started = time.perf_counter()
            rounds.append(list(pool.map(ask, prompts)))
            seconds.append(time.perf_counter() - started)
    return ServedRun(draft, shape, concurrency, sum(seconds) / len(seconds), rounds[0])


def parse_answer(prompt: Prompt, body: dict[str, Any], latency_seconds: float) -> ServedAnswer:
    """One answer of `/generate`. Raises `UserError` when the server aborted it or gave no token ids."""
    meta = body["meta_info"]
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise UserError(f"the server aborted {prompt.id}: {reason.get('message', reason)}")
    if "output_ids" not in body:
        raise UserError("the server's answer has no output_ids", prompt.id, "use the installed SGLang, not a proxy")
    return ServedAnswer(
        prompt_id=prompt.id,
        source=prompt.source,
        output_ids=[int(token) for token in body["output_ids"]],
        completion_tokens=meta["completion_tokens"],
        verifications=meta.get("spec_verify_ct", 0),
        histogram=list(meta.get("spec_correct_drafts_histogram", [])),
        latency_seconds=latency_seconds,
        cached_tokens=meta.get("cached_tokens", 0),
    )


def accept_lengths(run: ServedRun) -> dict[str, dict[str, Interval]]:
    """`total`, `per_request` and `counted` (see the module) by source and for "all", over requests ever verified."""
    groups: dict[str, list[ServedAnswer]] = {ALL: []}
    for answer in run.answers:
        if answer.verifications:
            groups[ALL].append(answer)
            groups.setdefault(answer.source, []).append(answer)
    return {source: _accept_length(answers) for source, answers in groups.items() if answers}


def positions(run: ServedRun) -> list[Interval]:
    """Acceptance by drafted position, given that the ones before were accepted.

    Raises `UserError` when no answer says how many drafts were accepted.
    """
    accepted = [answer.num_accepted for answer in run.answers if answer.histogram]
    if not accepted:
        raise UserError("no answer has a spec_correct_drafts_histogram", run.draft, "serve with the installed SGLang")
    return acceptance_by_position(accepted, run.shape.num_steps)


def table(runs: Sequence[ServedRun]) -> list[dict[str, Any]]:
    """One row per run: speed, speed-up over the run without a draft at the same concurrency, latency, acceptance.

    A speed-up is the accept length times the ratio of both `ms per pass`: one that drafts and verifies is longer."""
    plain = {run.concurrency: run for run in runs if run.shape is None}
    rows = []
    for run in runs:
        alone = plain.get(run.concurrency)
        row = {
            "draft": run.draft,
            "concurrency": run.concurrency,
            "tokens/s": run.tokens_per_second,
            "speed-up": run.tokens_per_second / alone.tokens_per_second if alone else None,
            "latency p50 (s)": run.latency_seconds(50),
            "latency p95 (s)": run.latency_seconds(95),
            "ms per pass": run.milliseconds_per_pass,
            "requests": len(run.answers),
        }
        if run.shape is not None and (lengths := accept_lengths(run).get(ALL)):
            row |= {name: lengths[name].value for name in ("counted", "total", "per_request")}
            row |= {f"accepted at {n}": found.value for n, found in enumerate(positions(run))}
        if cached := sum(answer.cached_tokens for answer in run.answers):
            row["cached prompt tokens"] = cached
        rows.append(row)
    return rows


def _accept_length(answers: Sequence[ServedAnswer]) -> dict[str, Interval]:
    verifications = [answer.verifications for answer in answers]
    tokens = [answer.completion_tokens for answer in answers]
    per_request = [a / b for a, b in zip(tokens, verifications, strict=True)]
    return {
        "total": ratio_interval(tokens, verifications),
        "per_request": ratio_interval(per_request, [1] * len(answers)),
        "counted": accept_length([answer.num_accepted for answer in answers]),
    }
