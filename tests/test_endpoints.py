"""HTTP endpoints: retries, Retry-After, dead servers, wrong addresses, and a key that stays secret."""

from __future__ import annotations

import asyncio
from email.utils import formatdate
from time import monotonic, time

import pytest
from fake_endpoint import Endpoint
from transformers import AutoTokenizer

from eagle3_utils.corpus.generation.endpoints import EndpointPool, Request, RequestFailed, Sampling, retry_after_seconds
from eagle3_utils.errors import UserError

KEY = "sk-secret-1234"
TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return AutoTokenizer.from_pretrained(tiny_llama)


@pytest.fixture
def endpoint(tokenizer):
    server = Endpoint(tokenizer)
    yield server
    server.shutdown()


def ask(urls, api="sglang", **options):
    async def one():
        async with EndpointPool(urls, api, "some-model", backoff_seconds=0.01, **options) as pool:
            return await pool.ask(Request(TALK, [1, 2], Sampling())), pool

    return asyncio.run(one())


def test_retry_after_is_obeyed(endpoint):
    endpoint.script = [(429, {"retry-after": "0.4"}), (503, {})]
    started = monotonic()
    reply, pool = ask([endpoint.url])
    assert monotonic() - started >= 0.4
    assert pool.num_retries == 2 and reply.finish_reason == "stop"


def test_a_rate_limit_is_waited_out_and_is_no_failed_try(endpoint):
    endpoint.script = [(429, {"retry-after": "0.01"})] * 9
    reply, pool = ask([endpoint.url], max_retries=1)
    assert reply.finish_reason == "stop" and pool.num_retries == 9
    endpoint.script = [(429, {"retry-after": "0.2"})] * 9
    with pytest.raises(RequestFailed, match="HTTP 429"):
        ask([endpoint.url], max_retries=1, timeout_seconds=0.3)


def test_a_limited_endpoint_rests_while_another_answers(endpoint, tokenizer):
    other = Endpoint(tokenizer)
    endpoint.script = [(429, {"retry-after": "30"})]
    started = monotonic()
    for _ in range(2):
        assert ask([endpoint.url, other.url])[0].finish_reason == "stop"
    other.shutdown()
    assert monotonic() - started < 5 and len(other.seen) == 1


def test_retry_after_as_seconds_and_as_a_date():
    assert retry_after_seconds("7") == 7.0
    assert retry_after_seconds(formatdate(time() + 30, usegmt=True)) == pytest.approx(30, abs=2)
    assert retry_after_seconds(None) is None and retry_after_seconds("soon") is None


def test_a_dead_endpoint_is_passed_over(endpoint):
    for _ in range(3):
        reply, _ = ask(["http://127.0.0.1:9", endpoint.url])
        assert reply.finish_reason == "stop"


def test_giving_up_says_how_often_it_tried(endpoint):
    endpoint.script = [(500, {})] * 3
    with pytest.raises(RequestFailed, match=r"HTTP 500.*3 tries"):
        ask([endpoint.url], max_retries=2)


def test_a_request_the_server_refuses_is_not_tried_again(endpoint):
    endpoint.script = [(400, {})] * 2
    with pytest.raises(RequestFailed, match="HTTP 400"):
        ask([endpoint.url])
    assert len(endpoint.seen) == 1


def test_a_wrong_address_stops_the_run(endpoint):
    endpoint.script = [(404, {})]
    with pytest.raises(UserError, match="api"):
        ask([endpoint.url])


def test_the_key_is_not_in_a_refusal_and_goes_to_no_native_endpoint(endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    endpoint.script = [(401, {})]
    with pytest.raises(UserError, match="OPENAI_API_KEY") as raised:
        ask([endpoint.url], api="openai")
    assert KEY not in str(raised.value) and "no such key: ***" in str(raised.value)
    assert endpoint.headers[-1]["authorization"] == f"Bearer {KEY}"
    ask([endpoint.url])
    assert "authorization" not in endpoint.headers[-1]


def test_tools_go_out_and_tool_calls_come_back(endpoint):
    tools = [{"type": "function", "function": {"name": "add"}}]
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    message = {"content": None, "tool_calls": [call]}
    endpoint.answer = lambda path, body: {"choices": [{"message": message, "finish_reason": "tool_calls"}]}

    async def one():
        async with EndpointPool([endpoint.url], "openai", "some-model") as pool:
            return await pool.ask(Request(TALK, [], Sampling(), tools=tools))

    reply = asyncio.run(one())
    assert endpoint.seen[0][1]["tools"] == tools
    assert (reply.text, reply.tool_calls, reply.finish_reason) == ("", [call], "tool_calls")


def test_an_openai_endpoint_needs_a_model_name():
    with pytest.raises(UserError, match="api_model"):
        EndpointPool(["http://x"], api="openai")


ANSWER = {"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}


def answering(endpoint, *answers):
    """Let an endpoint give these answers one after the other."""
    left = list(answers)
    endpoint.answer = lambda path, body: left.pop(0)


@pytest.mark.parametrize(
    "fault",
    [
        {"error": {"code": 502, "message": "provider"}},
        {"error": "overloaded"},
        {"error": {"code": 429, "message": "slow down"}},
        {"choices": [{"message": {"content": "ye"}, "error": {"code": 504}}]},
    ],
)
def test_an_error_inside_an_answer_with_status_200_is_tried_again(endpoint, fault):
    answering(endpoint, fault, ANSWER)
    reply, pool = ask([endpoint.url], api="openai")
    assert reply.text == "yes" and pool.num_retries == 1


def test_a_final_error_inside_an_answer_is_not_tried_again_and_other_nonsense_neither(endpoint):
    for fault, words in (
        ({"error": {"code": 403}}, "HTTP 400"),
        ({"id": 1}, "no openai answer"),
        ([], "no openai answer"),
    ):
        answering(endpoint, fault)
        with pytest.raises(RequestFailed, match=words):
            ask([endpoint.url], api="openai")


def test_token_ids_of_an_openai_endpoint_count_only_for_the_prompt_we_know(endpoint):
    choice = ANSWER["choices"][0]
    with_ids = {"choices": [choice | {"token_ids": [7, 8]}]}
    for prompt_ids, expected in (([1, 2], [7, 8]), ([1, 2, 3], None), (None, None)):
        answering(endpoint, with_ids | {"prompt_token_ids": prompt_ids})
        assert ask([endpoint.url], api="openai")[0].output_ids == expected


def test_extra_fields_are_laid_over_every_request_and_null_takes_one_out(endpoint):
    extra = {"max_tokens": None, "max_completion_tokens": 9, "chat_template_kwargs": {"enable_thinking": False}}
    ask([endpoint.url], api="openai", extra_body=extra)
    body = endpoint.seen[0][1]
    assert "max_tokens" not in body and body["max_completion_tokens"] == 9 and body["model"] == "some-model"
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    ask([endpoint.url], extra_body={"sampling_params": {"top_k": 20}})
    assert endpoint.seen[1][1]["sampling_params"] == {
        "temperature": 0.7, "top_p": 1.0, "max_new_tokens": 256, "top_k": 20,
        "skip_special_tokens": False, "spaces_between_special_tokens": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes", ("hm", "yes")),
        ("<|channel|>final<|message|>yes<|return|>", (None, "yes")),
        ("<|channel|>analysis<|message|>cut", None),
        ("<|channel|>commentary to=f <|constrain|>json<|message|>{}<|call|>", None),
        ("<tool_call>{}</tool_call> <|channel|>", None),
    ],
)
def test_channels_of_gpt_oss_become_reasoning_and_answer_and_other_marks_stay(endpoint, text, expected):
    answering(endpoint, {"text": text, "output_ids": [5], "meta_info": {"finish_reason": {"type": "stop"}}})
    reply, _ = ask([endpoint.url])
    assert (reply.reasoning, reply.text) == (expected or (None, text)) and reply.output_ids == [5]
