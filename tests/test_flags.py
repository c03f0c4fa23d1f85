"""Parameters → SGLang's command line."""

from __future__ import annotations

import pytest

from eagle3_utils.config import ExtractConfig, ServingOptions
from eagle3_utils.errors import UserError
from eagle3_utils.serving.launch.flags import longer_context, refuse_unsafe, server_command
from eagle3_utils.target import load_target


@pytest.fixture(scope="module")
def target(example_target):
    return load_target(str(example_target))


def command(target, extracting: bool = True, **options) -> str:
    parameters = ServingOptions.model_validate({"device": "cpu"} | options)
    return " ".join(server_command("python", parameters, target, 30000, extracting))


def test_a_server_listens_on_this_machine_only(target):
    assert "--host 127.0.0.1 --port 30000" in command(target)


def test_extraction_turns_off_what_hides_rows(target):
    flags = ("--disable-radix-cache", "--cuda-graph-backend-prefill disabled")
    assert all(flag in command(target) for flag in flags)
    assert not any(flag in command(target, extracting=False) for flag in flags)


def test_sums_over_ranks_are_finished_before_a_layer_hands_out_its_output(target):
    flag = "--enforce-disable-flashinfer-allreduce-fusion"
    assert flag in command(target, device="cuda", tp_size=8) and flag not in command(target)
    assert flag not in command(target, extracting=False, device="cuda", tp_size=8)


def test_waiting_for_room_in_staging_is_not_taken_for_a_hang(target):
    words = command(target).split()
    assert int(words[words.index("--watchdog-timeout") + 1]) > 10 * 120, "capture waits up to 120 s for each dump"


def test_the_cpu_gets_a_backend_and_a_bounded_cache(target):
    text = command(target)
    assert "--attention-backend torch_native" in text and "--max-total-tokens" in text
    assert "torch_native" not in command(target, device="cuda")


@pytest.mark.parametrize(("device", "asked", "off"), [("cpu", None, True), ("cuda", None, False), ("cpu", False, False),
                                                      ("cuda", True, True)])  # fmt: skip
def test_the_overlap_schedule_is_off_on_the_cpu_unless_said_otherwise(target, device, asked, off):
    assert ("--disable-overlap-schedule" in command(target, device=device, disable_overlap_schedule=asked)) is off


def test_parameters_reach_their_flags(target):
    text = command(
        target, device="cuda", tp_size=8, ep_size=8, dp_size=4, chunked_prefill_size=-1, mem_fraction_static=0.7
    )
    for flag in ("--tp-size 8", "--ep-size 8", "--dp-size 4", "--enable-dp-attention", "--chunked-prefill-size -1",
                 "--mem-fraction-static 0.7", "--disable-custom-all-reduce"):  # fmt: skip
        assert flag in text


def test_extra_flags_come_last_so_that_they_win(target):
    assert command(target, extra_server_args=["--max-total-tokens", "999"]).endswith("--max-total-tokens 999")


def test_samples_of_the_models_full_length_get_a_longer_context(target):
    assert target.max_position_embeddings == 8192
    assert longer_context(ExtractConfig(max_seq_len=1024), target) is None
    assert longer_context(ExtractConfig(max_seq_len=8192), target) > 8192
    full = server_command("python", ExtractConfig(max_seq_len=8192, device="cpu"), target, 1, extracting=True)
    assert full[full.index("--context-length") + 1] == "8208"


@pytest.mark.parametrize(
    "flag", ["--pp-size", "--pp-size=2", "--speculative-algorithm", "--attn-cp-size", "--enable-two-batch-overlap"]
)
def test_flags_that_corrupt_capture_are_refused(flag):
    with pytest.raises(UserError, match="cannot be used with capture"):
        refuse_unsafe([flag, "2"])
