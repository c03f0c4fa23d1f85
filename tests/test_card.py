"""The model card: every figure that was measured, none that was not, and a command that SGLang takes."""

from __future__ import annotations

import json

import pytest

from eagle3_utils.draft.card import card_text, write_card
from eagle3_utils.runs import write_json

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 576, "intermediate_size": 1536,
    "draft_vocab_size": 4096, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]},
}  # fmt: skip
TRAINED = {"validation_accuracy": [0.5, 0.25], "baseline_accuracy": 0.05, "accept_length": 1.62}
DONE = {
    "config": {"model": "/home/me/models/Tiny-1B", "max_seq_len": 512, "ttt_steps": 3, "loss": "soft"},
    "inputs": {"states": "abc"}, "outputs": {"draft": "d00d"}, "versions": {"sglang": "0.5.14"},
}  # fmt: skip
EVALUATED = {
    "accept_length_interval": {"value": 1.456, "low": 1.4, "high": 1.5}, "accept_length_by_source": {"maths": 1.7},
    "accept_length_from": "decoded", "num_prompts": 12, "max_new_tokens": 40, "shape": [5, 1, 6],
    "parity": {"passed": True, "offline": [0.5, 0.25], "served": [0.5, 0.125]},
    "served": [
        {"draft": "no draft", "concurrency": 1, "tokens/s": 900.0},
        {"draft": "3 · 1 · 4", "concurrency": 1, "tokens/s": 100.0, "counted": 1.43, "speed-up": 1.11},
        {"draft": "3 · 1 · 4", "concurrency": 8, "tokens/s": 800.0, "counted": 1.43, "speed-up": 1.11},
        {"draft": "8 · 1 · 9", "concurrency": 1, "tokens/s": 120.0, "counted": 1.44, "speed-up": 1.21},
        {"draft": "8 · 1 · 9", "concurrency": 8, "tokens/s": 700.0, "counted": 1.44, "speed-up": 1.09},
    ],
}  # fmt: skip


@pytest.fixture
def folders(tmp_path):
    run, draft = tmp_path / "run", tmp_path / "draft"
    write_json(draft / "config.json", CONFIG)
    write_json(run / "04_train_draft" / "metrics.json", TRAINED)
    write_json(run / "04_train_draft" / "DONE.json", DONE)
    return run, draft


def evaluated(run, draft="d00d", extra_server_args=(), **changes):
    write_json(run / "05_evaluate_acceptance" / "metrics.json", EVALUATED | changes)
    done = {"inputs": {"draft": draft}, "config": {"extra_server_args": list(extra_server_args)}}
    write_json(run / "05_evaluate_acceptance" / "DONE.json", done)


def served_flags(run, draft):
    command = write_card(draft, run).read_text().split("```")[1].replace("\\\n", " ").split()
    return dict(zip(command[3::2], command[4::2], strict=True))


def test_the_card_says_what_was_measured_and_how_to_serve(folders):
    run, draft = folders
    evaluated(run)
    corpus = {"num_samples": 1200, "num_tokens": 34567, "supervised_share": 0.5,
              "statistics": [{"source": "chat", "samples": 7, "tokens": 99}, {"source": "all"}]}  # fmt: skip
    write_json(run / "01_merge_data" / "metrics.json", corpus)
    text = write_card(draft, run).read_text()
    assert sorted(path.name for path in draft.iterdir()) == ["README.md", "config.json"]
    for words in (
        "base_model: Tiny-1B", "0.500 / 0.250", "1.46 [1.40, 1.50]; maths 1.70", "accept length 1.44, 1.21×",
        "1,200 samples, 34,567 tokens, 50% supervised", "| source chat | 7 samples", "draft `d00d`", "states `abc`",
        "layer ids for SGLang | [1, 14, 26]", "served acceptance equals the offline one | yes",
        "accept length, 12 held-out prompts of 40 tokens, steps · top-k · draft tokens 5 · 1 · 6",
        "accept length of the served tokens, offline and served | 1.75 and 1.62",
    ):  # fmt: skip
        assert words in text, words
    assert "/home/me" not in text and "source all" not in text


def test_the_command_is_one_that_the_installed_sglang_takes(folders):
    from sglang.srt.server_args import ServerArgs

    run, draft = folders
    evaluated(run, extra_server_args=["--cuda-graph-backend-prefill", "breakable"])
    flags = served_flags(run, draft)
    assert flags["--cuda-graph-backend-prefill"] == "breakable"
    assert all(flag[2:].replace("-", "_") in ServerArgs.__dataclass_fields__ for flag in flags)


@pytest.mark.parametrize(
    ("served", "steps"),
    [(EVALUATED["served"], "8"), (EVALUATED["served"][:3], "3"), (EVALUATED["served"][:1], "5"), ([], "5")],
)
def test_the_command_has_the_shape_that_was_fastest_with_fewest_in_flight(folders, served, steps):
    run, draft = folders
    evaluated(run, served=served, extra_server_args=["--flag", "of_servers_that_drafted_nothing"])
    flags = served_flags(run, draft)
    assert flags["--speculative-num-steps"] == steps and flags["--speculative-num-draft-tokens"] == str(int(steps) + 1)
    assert ("--flag" in flags) == (len(served) > 1)


def test_figures_of_another_draft_and_another_corpus_are_left_out(folders):
    run, draft = folders
    evaluated(run, draft="of an earlier training")
    write_json(run / "01_merge_data" / "metrics.json", {"num_samples": 7})
    write_json(run / "01_merge_data" / "DONE.json", {"outputs": {"corpus": "merged since"}})
    text = write_card(draft, run).read_text()
    assert "0.500 / 0.250" in text and "1.46" not in text and "## Data" not in text


def test_what_was_not_measured_is_left_out(folders):
    text = write_card(folders[1], folders[0]).read_text()
    assert "0.500 / 0.250" in text and "## Data" not in text and "served" not in text
    nothing = {number: {} for number in ("00", "01", "02", "03", "04", "05", "06")}
    text = card_text(json.loads(json.dumps(CONFIG)), nothing, nothing)
    assert "## Measured" not in text and "## Serve" in text and "4,096 of 49,152 tokens" in text
