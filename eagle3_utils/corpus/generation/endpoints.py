"""HTTP endpoints that answer prompts: SGLang's native API or any OpenAI-style one, many at once.

    async with EndpointPool(["http://127.0.0.1:30000"], api="sglang") as pool:
        reply = await pool.ask(Request(messages, prompt_ids, Sampling(max_new_tokens=64)))

A request goes to the endpoint with the fewest in flight that is not resting. 408, 5xx and broken connections are tried
again with exponential backoff, also where a gateway reports them inside an answer with status 200; after a 429 the
endpoint rests (as long as `Retry-After` says) and the request waits, which is no failed try. The API key comes from the
environment (`OPENAI_API_KEY`) and goes into one header; it is in no file, log or exception. The client is aiohttp:
httpx searches its whole pool for every request, which at 256 in flight left 39 responses a second
(benchmarks/client.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import time
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Literal

import aiohttp

from eagle3_utils.errors import UserError

KEY_VARIABLE = "OPENAI_API_KEY"
_JSON = {"Content-Type": "application/json"}
_RETRIABLE = {408, 409, 425, 429, 500, 502, 503, 504, 529}
_CHANNEL = re.compile(r"<\|channel\|>(analysis|final)<\|message\|>(.*?)(?=<\|end\|>|<\|start\|>|<\|return\|>|$)", re.S)


@dataclass(frozen=True)
class Sampling:
    """How a response is drawn. `temperature` 0 is greedy; `stop` are extra stop strings."""

    temperature: float = 0.7
    top_p: float = 1.0
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """One prompt: as messages (OpenAI style) and as the target's token ids (SGLang's native API)."""

    messages: list[dict[str, Any]]
    prompt_ids: list[int]
    sampling: Sampling
    seed: int | None = None
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Reply:
    """One answer. `output_ids` is None where the API returns only text; cost in the provider's currency."""

    text: str
    output_ids: list[int] | None
    finish_reason: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class RequestFailed(Exception):
    """A request that no retry will mend, or that used up its retries; the reason is one line without secrets."""


@dataclass
class _Endpoint:
    url: str
    in_flight: int = 0
    resting_until: float = 0.0


@dataclass
class EndpointPool:
    """A set of equal endpoints, used together.

    Parameters
    ----------
    urls : base addresses; for `openai` with or without the trailing `/v1`.
    api : which protocol they speak.
    api_model : the model's name at an OpenAI-style endpoint.
    extra_body : fields laid over every request, objects within objects too; None takes a field out.
    max_retries : tries after the first; waiting for a rate limit is none until it lasts `timeout_seconds` in all.
    """

    urls: list[str]
    api: Literal["sglang", "openai"] = "sglang"
    api_model: str | None = None
    max_retries: int = 5
    timeout_seconds: float = 600.0
    max_connections: int = 1024
    backoff_seconds: float = 0.5
    extra_body: dict[str, Any] = field(default_factory=dict)
    num_retries: int = field(default=0, init=False)

    def __post_init__(self):
        if not self.urls:
            raise UserError("no endpoint to ask", "endpoints")
        if self.api == "openai" and not self.api_model:
            raise UserError("an OpenAI-style endpoint needs the model's name", "api_model")
        self._endpoints = [_Endpoint(url.rstrip("/").removesuffix("/v1")) for url in self.urls]
        self._random = random.Random(0)

    async def __aenter__(self) -> EndpointPool:
        self._key = os.environ.get(KEY_VARIABLE, "") if self.api == "openai" else ""
        self._client = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            connector=aiohttp.TCPConnector(limit=self.max_connections),
            timeout=aiohttp.ClientTimeout(total=self.timeout_seconds),
            trust_env=self.api == "openai",  # proxies; an SGLang server of one's own is reached directly
        )
        return self

    async def __aexit__(self, *_exception) -> None:
        await self._client.close()

    async def ask(self, request: Request) -> Reply:
        """Answer one request.

        Raises
        ------
        RequestFailed
            When this request cannot be answered (other requests may be).
        UserError
            When no request can be: the key is refused or the path does not exist.
        """
        tries, attempt, limited = 0, 0, 0.0
        body = json.dumps(_merged(self._body(request), self.extra_body)).encode()
        while True:
            endpoint = await self._pick()
            endpoint.in_flight += 1
            status, asked = 0, None
            try:
                async with self._client.post(endpoint.url + self._path(), data=body, headers=_JSON) as response:
                    status, text = response.status, (await response.read()).decode(errors="replace")
                    asked = retry_after_seconds(response.headers.get("retry-after"))
            except (aiohttp.ClientError, TimeoutError) as error:
                reason = f"{type(error).__name__} at {endpoint.url}"
            else:
                if status == 200:
                    found = self._parse(text, request)
                    if isinstance(found, Reply):
                        return found
                    status = found
                reason = self._redacted(f"HTTP {status} from {endpoint.url}: {text[:200]!r}")
                self._raise_if_final(status, reason)
            finally:
                endpoint.in_flight -= 1
            wait = self._backoff(attempt) if asked is None else asked
            limited += wait if status == 429 else 0.0
            tries, attempt = tries + (status != 429 or limited > self.timeout_seconds), attempt + 1
            if tries > self.max_retries:
                raise RequestFailed(f"{reason} ({attempt} tries)")
            self.num_retries += 1
            if asked is not None or status in (0, 429):
                endpoint.resting_until = max(endpoint.resting_until, time.monotonic() + wait)
            else:
                await asyncio.sleep(wait)

    async def _pick(self) -> _Endpoint:
        while True:
            now = time.monotonic()
            awake = [endpoint for endpoint in self._endpoints if endpoint.resting_until <= now]
            if awake:
                return min(awake, key=lambda endpoint: endpoint.in_flight)
            await asyncio.sleep(min(endpoint.resting_until for endpoint in self._endpoints) - now)

    def _backoff(self, attempt: int) -> float:
        return min(60.0, self.backoff_seconds * 2**attempt) * (0.5 + self._random.random())

    def _redacted(self, text: str) -> str:
        """A server's words without the key, which some repeat when they refuse it."""
        return text.replace(self._key, "***") if self._key else text

    def _raise_if_final(self, status: int, reason: str) -> None:
        if status in (401, 403):
            raise UserError(f"refused: {reason}", fix=f"set {KEY_VARIABLE} in the environment")
        if status in (404, 405):
            raise UserError(f"no {self.api} API there: {reason}", "endpoints", "check the address and `api`")
        if status not in _RETRIABLE:
            raise RequestFailed(reason)

    def _path(self) -> str:
        return "/generate" if self.api == "sglang" else "/v1/chat/completions"

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        common = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        stop = {"stop": list(sampling.stop)} if sampling.stop else {}
        if self.api == "sglang":
            native = common | stop | {"max_new_tokens": sampling.max_new_tokens}
            native |= {"skip_special_tokens": False, "spaces_between_special_tokens": False}  # tool and channel marks
            if request.seed is not None:
                native["sampling_seed"] = request.seed
            return {"input_ids": request.prompt_ids, "sampling_params": native}
        seed = {} if request.seed is None else {"seed": request.seed}
        limits = {"max_tokens": sampling.max_new_tokens}
        tools = {"tools": request.tools} if request.tools else {}
        return {"model": self.api_model, "messages": request.messages} | common | stop | seed | limits | tools

    def _parse(self, text: str, request: Request) -> Reply | int:
        """The reply, or the HTTP status that an answer with an error inside should have had."""
        try:
            answer = json.loads(text)
            if self.api == "sglang":
                return _parse_sglang(answer)
            return _error_inside(answer) or _parse_openai(answer, request.prompt_ids)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise RequestFailed(f"an answer that is no {self.api} answer: {type(error).__name__}: {error}") from None


def retry_after_seconds(value: str | None) -> float | None:
    """Seconds asked for by a `Retry-After` header: a number or an HTTP date (RFC 9110, 10.2.3); None if absent."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _merged(body: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """`extra` laid over `body`, objects within objects too; a None takes a field out."""
    laid = {key: _merged(body.get(key) or {}, new) if isinstance(new, dict) else new for key, new in extra.items()}
    return {key: value for key, value in (body | laid).items() if value is not None}


def _error_inside(answer: dict[str, Any]) -> int:
    """The status of an error that a gateway (OpenRouter) sent with status 200, 400 if it is final; 0 for an answer."""
    error = answer.get("error") or (answer.get("choices") or [{}])[0].get("error")
    if not error:
        return 0
    code = error.get("code") if isinstance(error, dict) else None
    return (code if code in _RETRIABLE else 400) if isinstance(code, int) else 502


def _split_channels(text: str) -> tuple[str | None, str]:
    """Reasoning and answer of a text in gpt-oss's channels; None and the text where it has none, or no answer.

    Its template takes the answer alone when the turn is replayed and refuses channel marks.
    """
    parts = _CHANNEL.findall(text)
    if not text.startswith("<|channel|>") or len(parts) != text.count("<|channel|>"):
        return None, text
    reasoning, answer = ("".join(said for name, said in parts if name == which) for which in ("analysis", "final"))
    return (reasoning or None, answer) if answer else (None, text)


def _parse_sglang(body: dict[str, Any]) -> Reply:
    meta = body["meta_info"]
    reason = meta["finish_reason"]
    reason = reason.get("type", "unknown") if isinstance(reason, dict) else str(reason)
    if reason == "abort":
        raise RequestFailed(f"aborted by the server: {str(meta['finish_reason'])[:200]}")
    output_ids = body.get("output_ids")
    reasoning, text = _split_channels(body["text"])
    return Reply(
        text=text,
        reasoning=reasoning,
        output_ids=None if output_ids is None else [int(token) for token in output_ids],
        finish_reason=reason,
        prompt_tokens=int(meta.get("prompt_tokens", 0)),
        completion_tokens=int(meta.get("completion_tokens", 0)),
    )


def _parse_openai(body: dict[str, Any], prompt_ids: list[int]) -> Reply:
    """Token ids (vLLM gives them for `return_token_ids: true`) count only if the server read the very prompt we know:
    with another template or a thinking switch they answer something else."""
    choice, usage = body["choices"][0], body.get("usage") or {}
    message, ids = choice["message"], choice.get("token_ids")
    read = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
    return Reply(
        text=message.get("content") or "",
        output_ids=[int(token) for token in ids] if ids and read == prompt_ids else None,
        finish_reason=choice.get("finish_reason") or "unknown",
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        cost=float(usage.get("cost") or 0.0),
        reasoning=message.get("reasoning_content") or message.get("reasoning"),
        tool_calls=message.get("tool_calls") or None,
    )
