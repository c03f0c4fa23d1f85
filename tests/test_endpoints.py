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
