"""Responses by HTTP: what is asked, what is written, and that an interrupted run goes on."""

from __future__ import annotations

import ast
import asyncio
import itertools
import json

import nbformat
import papermill
import pytest
from chat_templates import QWEN3_THINKING, speaking
from fake_endpoint import Endpoint
from transformers import AutoTokenizer

from eagle3_utils.config import GenerateConfig
from eagle3_utils.corpus.generation import generate, responses
from eagle3_utils.corpus.generation.endpoints import EndpointPool, Sampling
from eagle3_utils.corpus.generation.responses import GenerateSettings
from eagle3_utils.errors import UserError
from eagle3_utils.runs import repo_root

SETTINGS = GenerateSettings("model-1", Sampling(0.7, 1.0, 16))
KEY = "sk-secret-1234"


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture
def endpoint(tokenizer):
    server = Endpoint(tokenizer)
    yield server
    server.shutdown()


def prompt(number: int, *turns: str, source: str = "chat") -> dict:
    messages = [{"role": "user", "content": turn} for turn in turns or (f"say {number}",)]
    return {"id": f"p{number}", "source": source, "split": "train", "messages": messages}


def run(prompts, path, urls, tokenizer, api="sglang", settings=SETTINGS, **options):
    async def all_of_it():
        async with EndpointPool(urls, api, "some-model", backoff_seconds=0.01, **options) as pool:
            return await generate.generate(prompts, path, pool, tokenizer, settings, num_concurrent=4)

    return asyncio.run(all_of_it())


def test_sglang_responses_keep_the_generated_ids(tmp_path, endpoint, tokenizer):
    path = tmp_path / "responses.jsonl"
    summary = run([prompt(i) for i in range(10)], path, [endpoint.url], tokenizer)
    made = responses.read_responses(path)
    assert set(made) == {f"p{i}" for i in range(10)} and summary.generated == 10
    line = made["p3"]
    text = tokenizer.apply_chat_template(line["messages"], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(line["prompt_ids"]) == text
    assert tokenizer.decode(line["output_ids"]) == "SAY 3<|im_end|>"
    assert (line["text"], line["finish_reason"], line["split"]) == ("SAY 3", "stop", "train")
    assert line["unasked_turns"] == 0
    sent = endpoint.seen[0][1]["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["max_new_tokens"]) == (0.7, 1.0, 16)
    assert summary.completion_tokens == sum(len(line["output_ids"]) for line in made.values())
    assert len({body["sampling_params"]["sampling_seed"] for _, body in endpoint.seen}) == 10


def test_openai_responses_have_text_and_cost_and_the_key_is_in_no_file(tmp_path, endpoint, tokenizer, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    path = tmp_path / "responses.jsonl"
    responses.resume(path, SETTINGS)
    endpoint.script = [(500, {})]
    summary = run([prompt(1), prompt(2)], path, [endpoint.url + "/v1/"], tokenizer, api="openai")
    line = responses.read_responses(path)["p1"]
    assert line["text"] == "SAY 1" and "output_ids" not in line and line["cost"] == 0.25
    assert endpoint.seen[0][0] == "/v1/chat/completions" and endpoint.seen[0][1]["model"] == "some-model"
    assert endpoint.headers[0]["authorization"] == f"Bearer {KEY}"
    assert (summary.cost, summary.prompt_tokens, summary.num_retries) == (0.5, 10, 1)
    assert not any(KEY in file.read_text() for file in tmp_path.iterdir())


def test_the_key_is_in_no_file_or_notebook_of_a_whole_stage(tmp_path, endpoint, tiny_llama, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt(i)) + "\n" for i in range(3)))
    endpoint.script = [(500, {}), (400, {})]  # both answers repeat the key
    parameters = {
        "run_dir": str(tmp_path / "run"), "model": str(tiny_llama), "prompts": [str(tmp_path / "prompts.jsonl")],
        "earlier_responses": [], "endpoints": [endpoint.url], "api": "openai", "api_model": "some-model",
        "num_concurrent": 1, "max_failed_fraction": 0.5,
    }  # fmt: skip
    notebook = repo_root() / "notebooks" / "00_generate_responses.ipynb"
    papermill.execute_notebook(notebook, tmp_path / "out.ipynb", parameters, cwd=repo_root(), progress_bar=False)
    assert {headers["authorization"] for headers in endpoint.headers} == {f"Bearer {KEY}"}
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"out.ipynb", "responses.jsonl", "responses.json", "metrics.json", "DONE.json"} <= {f.name for f in files}
    assert "HTTP 400" in (tmp_path / "out.ipynb").read_text()
    assert not [file for file in files if KEY.encode() in file.read_bytes()]


def run_notebook_here(notebook, parameters):
    """The notebook's code cells in this process: a kernel of its own takes seconds to import what is here already."""
    namespace = {"display": lambda figure: None}
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "code":
            code = compile(cell.source, str(notebook), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            waited = eval(code, namespace)
            if waited is not None:
                asyncio.run(waited)
        if "parameters" in cell.metadata.get("tags", []):
            namespace |= parameters


def test_a_stage_without_prompts_lets_the_target_make_them_up_and_answers_them(tmp_path, endpoint, tiny_llama):
    def answer(path, body):
        ids, sampling = body["input_ids"], body["sampling_params"]
        opening = endpoint.tokenizer.decode(ids).endswith("<|im_start|>user\n")
        what = sampling["sampling_seed"] if opening else "them"
        meta = {"finish_reason": {"type": "stop"}}
        return {"text": f"What would you do with the {what} old bicycles?", "output_ids": [9, 2], "meta_info": meta}

    endpoint.answer = answer
    parameters = {
        "run_dir": str(tmp_path / "run"), "model": str(tiny_llama), "prompts": [], "earlier_responses": [],
        "endpoints": [endpoint.url], "synthesise_prompts": 3, "num_concurrent": 1,
    }  # fmt: skip
    run_notebook_here(repo_root() / "notebooks" / "00_generate_responses.ipynb", parameters)
    made = list(responses.read_responses(tmp_path / "run" / "data" / "responses.jsonl").values())
    assert [line["id"] for line in made] == [f"self-made-0-00000{number}" for number in range(3)]
    assert made[2]["messages"][-1]["content"] == "What would you do with the 2 old bicycles?"
    metrics = json.loads((tmp_path / "run" / "00_generate_responses" / "metrics.json").read_text())
    assert (metrics["self_made_prompts"], metrics["responses"]) == (3, 3)


def test_a_stage_run_again_asks_only_what_its_prompts_now_lack(tmp_path, endpoint, tiny_llama, capsys):
    file, run_folder = tmp_path / "riddles.jsonl", tmp_path / "run"
    parameters = {
        "run_dir": str(run_folder), "model": str(tiny_llama), "prompts": [str(file)], "earlier_responses": [],
        "endpoints": [endpoint.url], "synthesise_prompts": 2, "num_concurrent": 1,
    }  # fmt: skip
    words = itertools.count()
    answer = endpoint.answer

    def answer_or_make_up(path, body):
        opening = endpoint.tokenizer.decode(body["input_ids"]).endswith("<|im_start|>user\n")
        made_up = f"What would you do with the {next(words)} old bicycles?"
        meta = {"finish_reason": {"type": "stop"}}
        return {"text": made_up, "output_ids": [9, 2], "meta_info": meta} if opening else answer(path, body)

    endpoint.answer = answer_or_make_up

    def run_with(*prompts):
        asked = len(endpoint.seen)
        file.write_text("".join(json.dumps(p) + "\n" for p in prompts))
        run_notebook_here(repo_root() / "notebooks" / "00_generate_responses.ipynb", parameters)
        lines = responses.read_responses(run_folder / "data" / "responses.jsonl")
        dropped = json.loads((run_folder / "00_generate_responses" / "metrics.json").read_text())["dropped"]
        return {name: line["text"] for name, line in lines.items()}, dropped, len(endpoint.seen) - asked

    without_source = {key: value for key, value in prompt(3).items() if key != "source"}
    first, dropped, asked = run_with(prompt(0), prompt(1), prompt(2), without_source)
    assert len(first) == 4 + 2 and not dropped and asked >= 6 + 2
    assert run_with(prompt(0), prompt(1), prompt(2), without_source) == (first, {}, 0)
    capsys.readouterr()
    changed, dropped, asked = run_with(prompt(0), prompt(1, "say anew"), prompt(2) | {"split": "eval"})
    assert changed == {name: first[name] for name in first if name not in ("p2", "p3")} | {"p1": "SAY ANEW"}
    assert dropped == {"prompt changed": 1, "prompt removed or held out": 2} and asked == 1
    assert "3 responses dropped: " in capsys.readouterr().out


def test_a_conversation_whose_reasoning_never_ended_counts_as_answered(tmp_path, endpoint, tiny_llama):
    tokenizer, path = speaking(tiny_llama, "QWEN3_THINKING", QWEN3_THINKING), tmp_path / "responses.jsonl"
    meta = {"finish_reason": {"type": "length"}}
    endpoint.answer = lambda path, body: {"text": "hm, hm", "output_ids": [9, 9], "meta_info": meta}
    asked = prompt(1, "one", "two")
    run([asked], path, [endpoint.url], tokenizer)
    line = responses.read_responses(path)["p1"]
    assert len(endpoint.seen) == 1 and line["unasked_turns"] == 1
    assert responses.answers(line, asked)


def test_fields_added_to_requests_are_part_of_how_responses_were_drawn(tmp_path):
    path = tmp_path / "responses.jsonl"
    plain = generate.settings_from(GenerateConfig(), "model-1")
    assert plain.extra_body is None
    responses.resume(path, plain)
    path.write_text(json.dumps(prompt(1) | {"text": "SAY 1"}) + "\n")
    assert set(responses.resume(path, plain)) == {"p1"}
    with pytest.raises(UserError, match="extra_body"):
        responses.resume(path, generate.settings_from(GenerateConfig(extra_body={"top_k": 20}), "model-1"))


def test_earlier_turns_keep_their_generated_ids(tmp_path, endpoint, tokenizer):
    path = tmp_path / "responses.jsonl"
    talk = prompt(1, "one", "two")
    talk["messages"].insert(1, {"role": "assistant", "content": "to be generated anew"})
    run([talk], path, [endpoint.url], tokenizer)
    line = responses.read_responses(path)["p1"]
    assert [m["content"] for m in line["messages"]] == ["one", "ONE", "two"]
    ids = line["prompt_ids"] + line["output_ids"]
    whole = tokenizer.apply_chat_template([*line["messages"], {"role": "assistant", "content": "TWO"}], tokenize=False)
    assert tokenizer.decode(ids) == whole.removesuffix("\n")
    ((start, end),) = line["output_spans"]
    assert tokenizer.decode(ids[start:end]) == "ONE<|im_end|>"


def test_a_template_that_drops_earlier_reasoning_gets_its_own_prompt_and_no_earlier_ids(tmp_path, endpoint, tiny_llama):
    tokenizer, path = speaking(tiny_llama, "QWEN3"), tmp_path / "responses.jsonl"
    text = "<think>\nhm\n</think>\n\nfine"
    ids = [*tokenizer.encode(text), tokenizer.convert_tokens_to_ids("<|im_end|>")]
    answer = {"text": text, "output_ids": ids, "meta_info": {"finish_reason": {"type": "stop"}}}
    endpoint.answer = lambda path, body: answer
    run([prompt(1, "one", "two")], path, [endpoint.url], tokenizer)
    line = responses.read_responses(path)["p1"]
    whole = tokenizer.apply_chat_template(line["messages"], add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(line["prompt_ids"]) == whole and "hm" not in whole and "fine" in whole
    assert line["output_ids"] == ids and "output_spans" not in line


def test_results_of_tools_are_not_replayed_and_tools_are_passed_on(tmp_path, endpoint, tokenizer):
    path, tools = tmp_path / "responses.jsonl", [{"type": "function", "function": {"name": "add"}}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    used = prompt(1, "1+1?") | {"tools": tools}
    used["messages"] += [call, {"role": "tool", "content": "2"}]
    summary = run([used, prompt(2) | {"tools": tools}], path, [endpoint.url], tokenizer, api="openai")
    assert summary.failed == {"results of tools cannot be replayed: other calls may be made now": 1}
    assert endpoint.seen[0][1]["tools"] == tools and responses.read_responses(path)["p2"]["tools"] == tools


def test_a_killed_run_goes_on_after_its_last_whole_line(tmp_path, endpoint, tokenizer):
    path = tmp_path / "responses.jsonl"
    prompts = [prompt(i) for i in range(6)]
    responses.resume(path, SETTINGS)
    run(prompts[:4], path, [endpoint.url], tokenizer)
    with open(path, "ab") as file:
        file.write(b'{"id": "p4", "text": "ha')
    done = responses.resume(path, SETTINGS)
    assert len(done) == 4
    run([p for p in prompts if p["id"] not in done], path, [endpoint.url], tokenizer)
    assert len(endpoint.seen) == 6 and len(path.read_text().splitlines()) == 6
    assert set(responses.resume(path, SETTINGS)) == {p["id"] for p in prompts}


def test_too_long_prompts_and_failures_are_counted_and_limited(tmp_path, endpoint, tokenizer):
    path = tmp_path / "responses.jsonl"
    endpoint.script = [(400, {})]
    settings = GenerateSettings("model-1", SETTINGS.sampling, max_prompt_tokens=60)
    prompts = [prompt(1), prompt(2, "long " * 80), prompt(3)]
    summary = run(prompts, path, [endpoint.url], tokenizer, settings=settings)
    assert summary.generated == 1 and summary.failed.total() == 2
    assert summary.failed["a prompt longer than 60 tokens"] == 1 and summary.failed["HTTP 400"] == 1
    generate.check_failures(summary, 3, 0.7)
    with pytest.raises(UserError, match="2 of 3 prompts"):
        generate.check_failures(summary, 3, 0.1)


def test_progress_is_told_as_responses_come(tmp_path, endpoint, tokenizer):
    told = []

    def tell(**fields):
        told.append(fields)

    async def all_of_it():
        async with EndpointPool([endpoint.url]) as pool:
            path = tmp_path / "r.jsonl"
            prompts = [prompt(i) for i in range(5)]
            await generate.generate(
                prompts,
                path,
                pool,
                tokenizer,
                SETTINGS,
                num_concurrent=1,
                progress=lambda **fields: told.append(fields),
            )

    asyncio.run(all_of_it())
    assert [fields["done"] for fields in told] == [1, 2, 3, 4, 5]
    assert told[-1]["eta_seconds"] == 0 and told[0]["unit"] == "responses" and told[0]["total"] == 5


def test_rows_by_source_count_tokens_and_endings(tokenizer):
    made = [prompt(i, source=s) | {"text": "a b", "output_ids": [1] * n, "finish_reason": f, "cost": 0.1 * n}
            for i, (s, n, f) in enumerate([("x", 4, "stop"), ("x", 2, "length"), ("y", 5, "stop")])]  # fmt: skip
    rows = generate.describe(made, {"p1"}, tokenizer)
    assert rows[0] == {"source": "x", "responses": 2, "generated_earlier": 1, "tokens": 6, "mean_tokens": 3.0,
                       "cost": 0.6, "ended_by_itself": 0.5}  # fmt: skip
    assert [row["tokens"] for row in rows] == [6, 5]
