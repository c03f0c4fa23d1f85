"""Stage 05 from a run folder to metrics.json, on a tiny random target and a draft that learnt a few of its texts."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import learn

from eagle3_utils import runs
from eagle3_utils.acceptance import evaluate, figures, forward, heldout, offline, parity, served
from eagle3_utils.acceptance.prompt_sets import Prompt
from eagle3_utils.acceptance.speculate import load_reference_model, plain_decode
from eagle3_utils.config import EvaluateConfig, TrainConfig
from eagle3_utils.corpus.records import Record, write_parquet
from eagle3_utils.devices import one_torch_thread
from eagle3_utils.draft.export import export_draft
from eagle3_utils.draft.training.build import new_draft
from eagle3_utils.draft.training.checkpoint import BEST_WEIGHTS, save_weights
from eagle3_utils.draft.unrolling.teacher import Teacher
from eagle3_utils.draft.vocab import vocab_map_of
from eagle3_utils.errors import UserError
from eagle3_utils.states.store import Sample, StoreMeta, StoreWriter
from eagle3_utils.target import load_target

AUX_LAYERS = [1, 2, 3]
PROMPTS = [Prompt(f"v{number}", "chat" if number % 2 else "code", [1, 50 + number, 60]) for number in range(4)]


def make_run(folder, tiny_llama):
    """A run folder with what stages 01, 03 and 04 leave: corpus, validation store, and a draft that knows its texts."""
    target = load_target(str(tiny_llama))
    model = load_reference_model(target)
    data = folder / "data"
    meta = StoreMeta(hidden_size=target.hidden_size, aux_layers=AUX_LAYERS, final="supervised", fingerprint="test")
    records, batches = [], []
    with StoreWriter(data / "hidden_states" / "val", meta, shard_bytes=1 << 20) as writer:
        for prompt in PROMPTS:
            output_ids = plain_decode(model, prompt.input_ids, 12).output_ids
            batch = forward.packed_samples(model, [prompt], [output_ids], AUX_LAYERS)[0]
            batches.append(batch)
            ids, mask = batch.input_ids.int().numpy(), batch.loss_mask.numpy().astype("uint8")
            final_rows = (batch.final_index >= 0).numpy()
            states = {"aux": batch.aux.bfloat16(), "final": batch.final.bfloat16(), "final_rows": final_rows}
            writer.add(Sample(prompt.id, ids, mask, **states, source=prompt.source))
            records.append(Record(prompt.id, prompt.source, ids.tolist(), mask.tolist()))
    (data / "corpus").mkdir()
    write_parquet(records, data / "corpus" / "train.parquet")
    torch.manual_seed(0)
    known = torch.cat([torch.arange(0, target.vocab_size, 50), *(batch.input_ids for batch in batches)]).unique()
    training = TrainConfig(model=str(tiny_llama), draft_vocab_size=len(known))
    draft = new_draft(training, target, AUX_LAYERS, vocab_map_of(known, target.vocab_size))
    learn(draft, Teacher.for_model(draft, target), batches, num_steps=40)
    export_draft(draft, target, data / "draft" / "export", torch.float32)
    save_weights(data / "draft" / BEST_WEIGHTS, draft)
    runs.write_json(folder / training.stage / "DONE.json", {"config": runs.config_values(training)})
    lines = [
        {"id": f"{source}{n}", "source": source, "split": "eval", "messages": [{"role": "user", "content": f"Say {n}"}]}
        for source in ("chat", "code")
        for n in range(3)
    ]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return EvaluateConfig(
        run_dir=str(folder), model=str(tiny_llama), prompts=[str(folder / "prompts.jsonl")], prompts_per_source=2,
        max_new_tokens=10, num_offline_steps=3, replay_shapes=[[1, 1, 2], [2, 2, 4]], device="cpu",
    )  # fmt: skip


@pytest.fixture(scope="module")
def config(tiny_llama, tmp_path_factory):
    with one_torch_thread():
        yield make_run(tmp_path_factory.mktemp("run"), tiny_llama)


@pytest.fixture(scope="module")
def work(config):
    return evaluate.Evaluation(config, runs.open_stage(config, {}))


@pytest.fixture(scope="module")
def decoded(work):
    return work.decode_held_out()


def test_teacher_forced_counts_cover_the_validation_store(work):
    samples = work.teacher_forced()
    assert [(sample.id, sample.source) for sample in samples] == [
        ("v0", "code"), ("v1", "chat"), ("v2", "code"), ("v3", "chat"),
    ]  # fmt: skip
    # 12 output tokens, the first of them predicted by slot 1, which has its token: all 12 at step 0
    assert all(sample.counts.supervised.tolist() == [12, 12, 11] for sample in samples)


def test_decoding_is_lossless_and_its_figures_become_metrics_the_summary_reads(work, config, decoded):
    assert [item.prompt.id for item in decoded] == ["chat0", "chat1", "code0", "code1"]
    differences = work.differences(decoded)
    teacher_forced = offline.summarise(work.teacher_forced(), num_resamples=20)
    lengths = {"decoded": heldout.accept_lengths(decoded, num_resamples=20)}
    by_shape = work.replay_shapes(decoded)
    left_out = work.serve()
    report = work.parity(left_out)
    metrics = figures.stage_metrics(
        config, teacher_forced, decoded, differences, lengths, by_shape, left_out, [], report
    )
    assert metrics == json.loads(json.dumps(metrics))
    assert metrics["identical"] is True and metrics["num_prompts"] == 4 and metrics["num_decoded_plainly"] == 2
    assert metrics["accept_length"] == lengths["decoded"]["all"].value >= 1.0
    assert set(metrics["accept_length_by_source"]) == {"chat", "code"}
    assert list(metrics["replayed"]) == ["1 · 1 · 2", "2 · 2 · 4"]
    assert metrics["served"] == [] and "no CUDA GPU" in metrics["served_left_out"]
    assert metrics["parity"]["passed"] is None and "left out" in left_out.text()
    rows = figures.step_rows(teacher_forced)
    assert [row["step"] for row in rows[:3]] == [0, 1, 2] and rows[0]["length_low"] <= rows[0]["accept_length"]
    assert figures.decoded_rows(lengths)[0]["source"] == "all"


def test_figures_on_the_decoded_tokens_and_replay_agree_with_decoding(work, decoded):
    samples = work.teacher_forced_on(decoded)
    assert [sample.counts.supervised[0] for sample in samples] == [10.0] * 4
    assert 1.0 <= work.replay_shapes(decoded)["1 · 1 · 2"].value <= 2.0


def test_a_token_that_is_clearly_not_the_best_is_an_error_and_a_tie_is_a_line(work, decoded, monkeypatch):
    item = decoded[0]
    output_ids = item.speculative.output_ids
    wrong = replace(item.speculative, output_ids=[*output_ids[:3], 7, *output_ids[4:]])
    with pytest.raises(UserError, match="not plain greedy's"):
        work.differences([replace(item, speculative=wrong)])
    with monkeypatch.context() as patched:
        patched.setattr(heldout, "greedy_violations", lambda *arguments: [(3, 1e-5)])
        assert work.differences([item]) == [f"{item.prompt.id}: token 3 is 1e-05 below the best logit"]
        patched.setattr(heldout, "greedy_violations", lambda *arguments: [])
        with pytest.raises(UserError, match="token 3 is not what plain decoding gives"):
            work.differences([replace(item, speculative=wrong)])


def test_without_reference_decoding_the_teacher_forced_length_is_the_headline(work, config):
    config = config.model_copy(update={"reference_decoding": False})
    teacher_forced = offline.summarise(work.teacher_forced(), num_resamples=20)
    assert offline.summarise(work.teacher_forced_on([])) == {}
    part = evaluate.ServedPart("served: off")
    metrics = figures.stage_metrics(
        config, teacher_forced, [], [], {"decoded": {}}, {}, part, [], parity.ParityReport(left_out="x")
    )
    assert metrics["accept_length_from"] == "teacher-forced" and metrics["identical"] is None
    assert metrics["accept_length"] == teacher_forced["all"]["accept_length"][2].value


def test_without_reference_decoding_the_target_is_never_loaded(config, work, decoded, monkeypatch):
    """The notebook's calls in their order, also with served answers: a target may be too large to be loaded here."""

    def load(*arguments):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(evaluate, "load_reference_model", load)
    alone = evaluate.Evaluation(config.model_copy(update={"reference_decoding": False}), work.stage)
    assert alone.teacher_forced() and alone.decode_held_out() == [] == alone.differences([])
    assert alone.teacher_forced_on([]) == []
    by_shape = alone.replay_shapes([])  # over the validation store
    assert list(by_shape) == ["1 · 1 · 2", "2 · 2 · 4"] and by_shape["1 · 1 · 2"].value > 1.0
    answers = [served.ServedAnswer(prompt.id, "chat", [5, 6, 7], 3, 2, [2], 1.0) for prompt in PROMPTS]
    runs_ = [served.ServedRun(served.NO_DRAFT, None, 1, 1.0, answers)]
    runs_ += [served.ServedRun("3 · 1 · 4", work.shape, 1, 1.0, [replace(a, output_ids=[5, 9, 7]) for a in answers])]
    for part in evaluate.ServedPart("served: off"), evaluate.ServedPart(runs=runs_, prompts=PROMPTS):
        assert len(alone.served_changes(part)) == (0 if part.left_out else 1)
        assert alone.parity(part).passed is None
    with pytest.raises(AssertionError, match="the target was loaded"):
        alone.teacher_forced_on(decoded)


def test_a_prompt_that_the_draft_was_trained_on_is_not_evaluated(config, work):
    corpus = work.stage.data / "corpus" / "train.parquet"
    before = corpus.read_bytes()
    try:
        answered = work.prompts(2, 10)[0]
        ids = [*answered.input_ids, 5, 6]
        write_parquet([Record(answered.id, answered.source, ids, [0] * (len(ids) - 2) + [1, 1])], corpus)
        with pytest.raises(UserError, match=r"prompts\.jsonl:1: 1 of 4 held-out prompts are in the training corpus"):
            work.decode_held_out()
    finally:
        corpus.write_bytes(before)


def test_without_the_corpus_there_is_no_check_and_no_baseline_and_that_is_said_once(config, work, caplog):
    corpus = work.stage.data / "corpus" / "train.parquet"
    before, expected = corpus.read_bytes(), work.prompts(2, 10)
    try:
        corpus.unlink()
        alone = evaluate.Evaluation(config, work.stage)
        assert alone.prompts(2, 10) == alone.prompts(2, 10) == expected
        figures_by_step = offline.summarise(alone.teacher_forced(), num_resamples=20)["all"]
        assert [interval.value for interval in figures_by_step["baseline"]] == [0.0] * config.num_offline_steps
    finally:
        corpus.write_bytes(before)
    assert caplog.text.count(f"no {corpus}") == 1


def test_parity_compares_with_the_trained_draft_not_the_exported_one(work, monkeypatch):
    """The exported and served draft has absolute d2t; the trained draft, unharmed, finds it out."""
    name, broken = next(item for item in parity.faults(work.draft, work.target) if "absolute" in item[0])
    monkeypatch.setitem(work.__dict__, "draft", broken)
    answers = []
    for prompt in PROMPTS:
        output_ids = plain_decode(work.model, prompt.input_ids, 12).output_ids
        batch = forward.packed_samples(work.model, [prompt], [output_ids], AUX_LAYERS)[0]
        counts = heldout.accepted_histogram([heldout.replay(broken, batch, work.shape)], 3)
        answers.append(served.ServedAnswer(prompt.id, "chat", output_ids, 12, sum(counts), counts, 1.0))
    run = served.ServedRun("3 · 1 · 4", work.shape, 1, 1.0, answers)
    part = evaluate.ServedPart(runs=[run], prompts=PROMPTS)
    assert part.accept_lengths() == {
        "served 3 · 1 · 4": {s: of["counted"] for s, of in served.accept_lengths(run).items()}
    }
    report = work.parity(part)
    assert report.num_verifications == sum(answer.verifications for answer in answers)
    assert sum(report.offline) > 1 and not report.passed and name in report.causes
    mute = replace(run, answers=[replace(answer, histogram=[]) for answer in answers])
    assert work.parity(replace(part, runs=[mute])).passed is None
    slow = replace(run, concurrency=8, answers=answers[:1])
    assert replace(part, runs=[slow, run]).accept_lengths() == part.accept_lengths()


def test_a_draft_of_other_layers_than_the_store_is_refused(config, work, tmp_path):
    folder = work.draft_folder
    original = (folder / "config.json").read_text()
    values = json.loads(original)
    values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [3, 4, 5]
    try:
        (folder / "config.json").write_text(json.dumps(values))
        with pytest.raises(UserError, match=r"takes layers \[3, 4, 5\].*holds \[1, 2, 3\]"):
            evaluate.Evaluation(config, work.stage)
    finally:
        (folder / "config.json").write_text(original)


def test_trained_draft_has_the_weights_and_the_shape_of_training_whatever_was_exported(work, config):
    path, exported = work.stage.data / "draft" / BEST_WEIGHTS, work.draft_folder / "config.json"
    done = work.stage.run_folder / "04_train_draft" / "DONE.json"
    before = [file.read_bytes() for file in (path, exported, done)]
    try:
        tensors = load_file(path)
        save_file(tensors | {"norm.weight": torch.full_like(tensors["norm.weight"], 3.0)}, path)
        linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
        runs.write_json(done, {"config": runs.read_json(done)["config"] | {"rope": linear}})
        runs.write_json(exported, runs.read_json(exported) | {"norm_output": False})
        harmed = evaluate.Evaluation(config, work.stage)
        draft = harmed.trained_draft()
        assert draft.norm.weight.eq(3.0).all() and not harmed.draft.norm.weight.eq(3.0).any()
        assert draft.config == replace(work.draft.config, rope=linear) and draft.config.norm_output
        assert not harmed.draft.config.norm_output
        done.unlink()
        assert harmed.trained_draft() is harmed.draft
    finally:
        for file, content in zip((path, exported, done), before, strict=True):
            file.write_bytes(content)
