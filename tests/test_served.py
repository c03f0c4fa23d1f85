"""Served evaluation: answers in SGLang 0.5.14's shape are read right, and every figure is the one it says."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from eagle3_utils.acceptance import served
from eagle3_utils.acceptance.prompt_sets import Prompt
from eagle3_utils.acceptance.served import NO_DRAFT, ServedRun
from eagle3_utils.acceptance.tree import TreeShape
from eagle3_utils.config import EvaluateConfig
from eagle3_utils.errors import UserError

PROMPT = Prompt("p1", "chat", [1, 2, 3])


def answer_body(output_ids, histogram=None, verifications=None, finish="stop"):
    """What `/generate` answers: names as in tokenizer_manager.py `_calculate_spec_decoding_metrics`."""
    meta = {
        "id": "x", "finish_reason": {"type": finish, "matched": 2}, "prompt_tokens": 3, "cached_tokens": 0,
        "completion_tokens": len(output_ids), "e2e_latency": 0.5, "weight_version": "default",
    }  # fmt: skip
    if histogram is not None:
        correct = sum(accepted * count for accepted, count in enumerate(histogram))
        meta |= {
            "spec_accept_rate": correct / (3 * verifications), "spec_accept_length": len(output_ids) / verifications,
            "spec_num_correct_drafts": correct, "spec_num_proposed_drafts": 3 * verifications,
            "spec_verify_ct": verifications, "spec_correct_drafts_histogram": histogram,
            "spec_accept_histogram": histogram,
        }  # fmt: skip
    return {"text": "…", "output_ids": output_ids, "meta_info": meta}


def answer(prompt_id, source, num_tokens, histogram=None, latency=1.0):
    verifications = sum(histogram) if histogram else None
    body = answer_body(list(range(num_tokens)), histogram, verifications)
    return served.parse_answer(Prompt(prompt_id, source, [1]), body, latency)


def test_an_answer_with_a_draft_is_read_whole():
    found = served.parse_answer(PROMPT, answer_body([5, 6, 7, 8, 2], [1, 0, 0, 1], 2), 0.25)
    assert (found.prompt_id, found.source, found.output_ids) == ("p1", "chat", [5, 6, 7, 8, 2])
    assert (found.completion_tokens, found.verifications, found.latency_seconds) == (5, 2, 0.25)
    assert found.num_accepted == [0, 3]


def test_an_answer_without_a_draft_or_ended_by_prefill_has_no_verifications():
    found = served.parse_answer(PROMPT, answer_body([2]), 0.1)
    assert (found.verifications, found.histogram, found.num_accepted) == (0, [], [])


def test_aborted_answers_and_answers_without_ids_are_errors_that_name_the_prompt():
    body = answer_body([1], finish="abort")
    body["meta_info"]["finish_reason"]["message"] = "out of memory"
    with pytest.raises(UserError, match="aborted p1: out of memory"):
        served.parse_answer(PROMPT, body, 0.1)
    body = answer_body([1])
    del body["output_ids"]
    with pytest.raises(UserError, match="no output_ids"):
        served.parse_answer(PROMPT, body, 0.1)


@pytest.fixture
def runs():
    plain = [answer("a", "chat", 9, latency=2.0), answer("b", "code", 5, latency=1.0), answer("c", "chat", 1)]
    # a: 1 token from prefill + 3 + 4 = 8, one more cut by a stop; b: 1 + 1 + 1 + 1 + 1
    fast = [answer("a", "chat", 8, [0, 0, 1, 1]), answer("b", "code", 5, [4]), answer("c", "chat", 1)]
    shape = TreeShape(3)
    return [ServedRun(NO_DRAFT, None, 8, 3.0, plain), ServedRun("3 · 1 · 4", shape, 8, 2.0, fast)]


def test_accept_length_three_ways(runs):
    found = served.accept_lengths(runs[1])
    assert set(found) == {"all", "chat", "code"}
    assert found["all"]["total"].value == (8 + 5) / (2 + 4)  # Σ completion tokens / Σ verifications
    assert found["all"]["per_request"].value == (8 / 2 + 5 / 4) / 2
    assert found["all"]["counted"].value == (3 + 4 + 4 * 1) / 6  # 1 + accepted, over verifications
    assert found["chat"]["counted"].value == 3.5


def test_positions_are_shares_of_those_that_got_there(runs):
    found = served.positions(runs[1])
    assert [interval.value for interval in found] == [2 / 6, 1.0, 1 / 2]


def test_a_server_that_counts_no_drafts_is_told_from_one_that_accepts_none(runs):
    mute = replace(runs[1], answers=[replace(item, histogram=[]) for item in runs[1].answers])
    with pytest.raises(UserError, match="no answer has a spec_correct_drafts_histogram"):
        served.table([mute])


def test_table_has_speed_speed_up_and_latency(runs):
    plain, fast = served.table(runs)
    assert plain["tokens/s"] == 5.0 and plain["speed-up"] == 1.0 and "total" not in plain
    assert plain["latency p50 (s)"] == 1.0 and plain["latency p95 (s)"] == pytest.approx(1.9)
    assert fast["tokens/s"] == 7.0 and fast["speed-up"] == pytest.approx(1.4)
    assert plain["ms per pass"] == pytest.approx(4000 / 15) and fast["ms per pass"] == pytest.approx(3000 / (2 + 4 + 1))
    assert fast["requests"] == 3 and list(fast)[-3:] == ["accepted at 0", "accepted at 1", "accepted at 2"]


class SlowClient:
    """Counts how many requests are in flight at once."""

    def __init__(self):
        self.in_flight = self.most = self.warm_ups = self.asked = 0

    def generate(self, input_ids, *, max_new_tokens, **fields):
        self.warm_ups += max_new_tokens == 16
        self.asked += 1
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        time.sleep(0.02)
        self.in_flight -= 1
        return answer_body(input_ids * 2, [1], 1)


def test_measure_keeps_that_many_requests_in_flight_and_order_and_does_not_count_the_warm_up():
    prompts = [Prompt(str(n), "chat", [n]) for n in range(12)]
    client = SlowClient()
    run = served.measure(client, prompts, 64, 4, "3 · 1 · 4", TreeShape(3))
    assert [found.prompt_id for found in run.answers] == [str(n) for n in range(12)]
    assert client.most == 4 and client.warm_ups == 12  # every prompt
    assert client.asked == 12 * (1 + 3)  # a short run is timed three times
    assert run.tokens_per_second == pytest.approx(24 / run.wall_seconds)


def test_serve_starts_one_server_without_and_one_per_shape_with_the_same_flags(monkeypatch, tmp_path):
    started = []

    class FakeServer:
        def __init__(self, config, target, log_path, folder, extra_args):
            started.append((log_path.name, extra_args))
            self.client = SlowClient()

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            return None

    monkeypatch.setattr(served, "Server", FakeServer)
    config = EvaluateConfig(served_shapes=[[3, 1, 4], [3, 4, 8]], served_concurrency=[1, 4])
    done = []
    runs = served.serve(
        config, SimpleNamespace(), [PROMPT], tmp_path / "draft", tmp_path, lambda line: None, done.append
    )
    assert done == [0, 1, 2, 3, 4, 5, 6]
    assert [(run.draft, run.concurrency) for run in runs] == [
        ("no draft", 1), ("no draft", 4), ("3 · 1 · 4", 1), ("3 · 1 · 4", 4), ("3 · 4 · 8", 1), ("3 · 4 · 8", 4),
    ]  # fmt: skip
    common = ["--disable-radix-cache", "--cuda-graph-max-bs-decode", "4", "--max-running-requests", "4"]
    assert started[0] == ("server-nodraft.log", common)
    name, flags = started[2]
    assert name == "server-3·4·8.log" and flags[:5] == common
    values = dict(zip(flags[5::2], flags[6::2], strict=True))
    assert values == {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": str(tmp_path / "draft"),
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "4",
        "--speculative-num-draft-tokens": "8",
    }


def test_servers_of_the_user_say_what_they_draft_and_are_left_running(monkeypatch, tmp_path):
    alone, drafting = {"speculative_algorithm": None}, {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 5}
    drafting |= {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": 6}
    drafting |= {"speculative_draft_model_path": "/elsewhere"}
    closed, lines = [], []

    class FakeAttached:
        def __init__(self, url, dump_dir, target, capture):
            self.client = SlowClient()
            self.client.get_json = lambda path: {"a": alone, "b": drafting}[url]
            self.client.close = lambda: closed.append(url)

    monkeypatch.setattr(served, "AttachedServer", FakeAttached)
    config = EvaluateConfig(server_urls=["a", "b"], served_concurrency=[2], device="cpu")
    assert served.why_not_served(config) is None  # the GPU is there, not here
    runs = served.serve(config, SimpleNamespace(), [PROMPT], tmp_path / "draft", tmp_path, lines.append)
    assert [(run.draft, run.concurrency) for run in runs] == [("no draft", 2), ("5 · 1 · 6", 2)]
    assert closed == ["a", "b"] and any("/elsewhere" in line for line in lines)
    with pytest.raises(UserError, match="drafts with NGRAM"):
        served.shape_served({"speculative_algorithm": "NGRAM"}, tmp_path)


def test_a_server_alone_has_no_speed_up_and_cached_prompts_are_said(runs):
    row = served.table(runs[1:])[0]
    assert row["speed-up"] is None and row["accepted at 0"] == 2 / 6
    body = answer_body([5])
    body["meta_info"]["cached_tokens"] = 3
    cached = served.parse_answer(PROMPT, body, 0.1)
    assert served.table([ServedRun(NO_DRAFT, None, 1, 1.0, [cached])])[0]["cached prompt tokens"] == 3


def test_flags_are_flags_of_the_installed_sglang():
    from sglang.srt.server_args import ServerArgs

    fields = ServerArgs.__dataclass_fields__
    flags = served.speculative_flags("folder", TreeShape(3))[::2]
    for flag in [*flags, "--disable-radix-cache", "--max-running-requests", "--cuda-graph-max-bs-decode"]:
        assert flag.removeprefix("--").replace("-", "_") in fields, flag


def test_why_not_served_says_the_reason_and_on_insists():
    assert served.why_not_served(EvaluateConfig(served="off")) == "served: off"
    assert "no CUDA GPU" in served.why_not_served(EvaluateConfig(device="cpu"))
    assert served.why_not_served(EvaluateConfig(device="cuda")) is None
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        served.why_not_served(EvaluateConfig(device="cpu", served="on"))
