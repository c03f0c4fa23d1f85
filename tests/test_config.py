"""Parameters: strict, named in errors, the same in the models, the notebooks and the YAML files."""

from __future__ import annotations

import pytest

from eagle3_utils.config import STAGES, TrainConfig, read_parameters, stage_named, stage_parameters
from eagle3_utils.errors import UserError
from eagle3_utils.runs import repo_root

PARAMETER_FILES = sorted((repo_root() / "parameters").glob("*.yaml"))


def test_unknown_key_is_an_error_that_names_it():
    with pytest.raises(UserError, match="unknown key 'learning_rat'; did you mean 'learning_rate'") as caught:
        TrainConfig.parse({"learning_rat": 1.0e-4})
    assert caught.value.exit_code == 2


def test_a_yaml_number_that_is_text_is_refused_with_a_hint():
    with pytest.raises(UserError, match=r"learning_rate = '1e-4'.*write 1\.0e-4"):
        TrainConfig.parse({"learning_rate": "1e-4"})


def test_wrong_type_is_refused_and_not_converted():
    with pytest.raises(UserError, match="max_seq_len"):
        TrainConfig.parse({"max_seq_len": "1024"})


@pytest.mark.parametrize("values", [{"num_gpus": 8}, {"num_gpus": 4, "batches_per_step": 6}])
def test_gpus_must_share_out_the_batches_of_a_step(values):
    with pytest.raises(UserError, match=r"batches_per_step = [16]: must be a multiple of num_gpus, [48]"):
        TrainConfig.parse(values)
    assert TrainConfig.parse({"num_gpus": 4, "batches_per_step": 8}).batches_per_step == 8


def test_from_notebook_takes_its_own_names_only():
    config = TrainConfig.from_notebook({"epochs": 3.0, "In": [], "torch": object()})
    assert config.epochs == 3.0


@pytest.mark.parametrize("name", ["3", "03", "extract_hidden_states", "03_extract_hidden_states"])
def test_a_stage_goes_by_number_or_name(name):
    assert stage_named(name) == "03_extract_hidden_states"


def test_unknown_stage_is_an_error():
    with pytest.raises(UserError, match="no stage '9'"):
        stage_named("9")


def test_shared_keys_reach_only_the_stages_that_have_them(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("shared: {max_seq_len: 64, temperature: 0.5}\n04_train_draft: {epochs: 1.0}\n")
    parameters = read_parameters(file, ["4.epochs=2.5", "shared.seed=7"])
    assert stage_parameters(parameters, "04_train_draft") == {"max_seq_len": 64, "seed": 7, "epochs": 2.5}
    assert stage_parameters(parameters, "00_generate_responses")["temperature"] == 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shared: {no_such_key: 1}", "shared.no_such_key: no stage has this key"),
        ("shared: {5: x}", "shared.5: no stage has this key"),
        ("05_evaluate: {}", "unknown section '05_evaluate'"),
        ("shared: {a: [", "not valid YAML"),
        ("03: {codec: fp8}\n03: {}\n", "3 is written twice"),
        (b"shared: {seed: 1} # \xe9", "not valid YAML"),
        ("hello", "holds no sections"),
        ("shared: [1, 2]", "section shared must hold keys and values"),
    ],
)
def test_broken_parameters_files_are_refused(tmp_path, text, message):
    file = tmp_path / "p.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        read_parameters(file)


def test_an_override_that_is_no_yaml_is_refused_by_name(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("shared: {seed: 1}\n")
    with pytest.raises(UserError, match=r"--set 0\.endpoints=\[,a\]: not valid YAML"):
        read_parameters(file, ["0.endpoints=[,a]"])


def test_a_switch_set_on_the_command_line_is_a_switch(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("05_evaluate_acceptance: {served: on}\n")
    for overrides, meant in ([], "on"), (["5.served=off"], "off"):
        values = stage_parameters(read_parameters(file, overrides), "05_evaluate_acceptance")
        assert STAGES["05_evaluate_acceptance"].parse(values).served == meant


@pytest.mark.parametrize("path", PARAMETER_FILES, ids=lambda path: path.stem)
def test_every_parameters_file_is_valid_for_every_stage(path):
    parameters = read_parameters(path)
    configs = [model.parse(stage_parameters(parameters, stage)) for stage, model in STAGES.items()]
    assert len({config.run_dir for config in configs}) == 1
    assert len({config.max_seq_len for config in configs}) == 1
