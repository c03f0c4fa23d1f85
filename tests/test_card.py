"""The model card: every figure that was measured, none that was not, and a command that SGLang takes."""

from __future__ import annotations

import json

import pytest

from eagle3_utils.draft.card import card_text, folder_name, write_card
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


def evaluated(run, draft="d00d", extra_server_args=(), tp_size=1, **changes):
    write_json(run / "05_evaluate_acceptance" / "metrics.json", EVALUATED | changes)
    config = {"extra_server_args": list(extra_server_args), "tp_size": tp_size}
    write_json(run / "05_evaluate_acceptance" / "DONE.json", {"inputs": {"draft": draft}, "config": config})


def served_flags(run, draft):
    """Flag -> value of the card's command, None where it has none."""
    words = write_card(draft, run).read_text().split("```")[1].replace("\\\n", " ").split()[3:]
    follows = [None if word.startswith("--") else word for word in [*words[1:], "--"]]
    return {word: value for word, value in zip(words, follows, strict=True) if word.startswith("--")}


def test_the_card_says_what_was_measured_and_how_to_serve(folders):
    run, draft = folders
    evaluated(run)
    corpus = {"num_samples": 1200, "num_tokens": 34567, "supervised_share": 0.5,
              "statistics": [{"source": "chat", "samples": 7, "tokens": 99}, {"source": "all"}]}  # fmt: skip
    write_json(run / "01_merge_data" / "metrics.json", corpus)
    write_json(run / "01_merge_data" / "DONE.json", {})
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
    evaluated(run, extra_server_args=["--cuda-graph-backend-prefill", "breakable"], tp_size=8)
    write_json(run / "04_train_draft" / "DONE.json", DONE | {"config": DONE["config"] | {"trust_remote_code": True}})
    flags = served_flags(run, draft)
    assert flags["--tp-size"] == "8" and "--trust-remote-code" in flags
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


def test_without_a_served_draft_the_targets_flags_are_those_it_was_captured_with(folders):
    run, draft = folders
    assert not {"--tp-size", "--trust-remote-code"} & served_flags(run, draft).keys()
    evaluated(run, served=[])
    captured = {"tp_size": 4, "trust_remote_code": True, "mem_fraction_static": 0.8, "extra_server_args": ["--x", "1"]}
    write_json(run / "02_patch_and_probe" / "DONE.json", {"config": captured})
    flags = served_flags(run, draft)
    assert flags["--tp-size"] == "4" and "--trust-remote-code" in flags
    assert not {"--mem-fraction-static", "--x"} & flags.keys()
    write_json(run / "03_extract_hidden_states" / "DONE.json", {"config": captured | {"tp_size": 2}})
    assert served_flags(run, draft)["--tp-size"] == "2"


def test_other_runs_states_and_a_warm_start_are_said_by_name(folders):
    run, draft = folders
    config = {"more_data": ["outputs/second/data", "/disk/third"], "init_from": "/home/me/old/data/draft/export"}
    write_json(run / "04_train_draft" / "DONE.json", DONE | {"config": DONE["config"] | config})
    write_json(run / "04_train_draft" / "metrics.json", TRAINED | {"report": {"steps": 1200, "tokens": 345678}})
    corpus = {"num_samples": 1200, "num_tokens": 34567, "supervised_share": 0.5}
    write_json(run / "01_merge_data" / "metrics.json", corpus)
    write_json(run / "01_merge_data" / "DONE.json", {})
    text = write_card(draft, run).read_text()
    for words in (
        "| corpus of this run alone | 1,200 samples", "also trained on the states of 2 other runs | second, third |",
        "| warm start from | old |", "1,200 steps, 345,678 tokens over all epochs",
    ):  # fmt: skip
        assert words in text, words
    assert "/home/me" not in text and "/disk" not in text
    assert folder_name("outputs/old/data/draft/checkpoints/step-000300") == "old/step-000300"
    assert folder_name("/data") == "data" and folder_name("/drafts/public") == "public"


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
