"""Talking to an SGLang server: health, identity, generation with log-probabilities, and dumps by request id."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import SafetensorError, safe_open

from eagle3_utils.errors import UserError


class DumpError(RuntimeError):
    """A request's hidden states did not arrive; the message is the server's reason."""


@dataclass(frozen=True)
class Dump:
    """One request's hidden states: `input_ids` int64 [T], `aux` [T, L, H], `final` [T, H] after the final norm.

    `hidden` [T, n + 1, H] holds every boundary, for requests whose id starts with `hs-all-`.
    """

    input_ids: torch.Tensor
    aux: torch.Tensor
    final: torch.Tensor
    hidden: torch.Tensor | None
    metadata: dict[str, str]

    @property
    def boundaries(self) -> list[int]:
        return json.loads(self.metadata["boundaries"])


def read_dump(path: Path) -> Dump:
    """Read a dump and check that its tensors agree on T and that it is whole. Raises `DumpError`."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        dump = Dump(tensors["input_ids"], tensors["aux"], tensors["final"], tensors.get("hidden"), metadata)
    except (OSError, KeyError, SafetensorError) as error:
        raise DumpError(f"{path.name} is not a whole dump: {error}") from None
    lengths = {tensor.shape[0] for tensor in tensors.values()} | {int(metadata["num_tokens"])}
    if len(lengths) != 1:
        raise DumpError(f"{path.name}: tensors disagree on the number of tokens: {sorted(lengths)}")
    return dump


class Client:
    """A synchronous client for one server; safe to share between threads.

    Parameters
    ----------
    url : e.g. http://127.0.0.1:30000
    dump_dir : where the server's capture leaves dumps, if it captures.
    """

    def __init__(self, url: str, dump_dir: Path | None = None, timeout_seconds: float = 600.0):
        self.url, self.dump_dir = url.rstrip("/"), dump_dir
        limits = httpx.Limits(max_connections=256, max_keepalive_connections=256)
        self._http = httpx.Client(base_url=self.url, timeout=timeout_seconds, limits=limits, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def get_json(self, path: str, timeout_seconds: float = 10.0) -> Any:
        """GET a JSON document. Raises `httpx.HTTPError`."""
        answer = self._http.get(path, timeout=timeout_seconds)
        answer.raise_for_status()
        return answer.json()

    def is_healthy(self, timeout_seconds: float = 30.0) -> bool:
        """Whether `/health_generate` is answered: a token went through the model."""
        try:
            return self._http.get("/health_generate", timeout=timeout_seconds).status_code == 200
        except httpx.HTTPError:
            return False

    def generate(self, input_ids: list[int], *, rid: str | None = None, max_new_tokens: int = 0, **fields: Any) -> dict:
        """POST /generate with token ids. `fields` go into the request (`return_logprob=True`, …).

        Raises
        ------
        DumpError
            When the server answers with an error; the message is the server's. Or when it does not answer.
        """
        sampling = {"max_new_tokens": max_new_tokens, "temperature": 0.0} | fields.pop("sampling_params", {})
        body = {"input_ids": input_ids, "sampling_params": sampling} | fields
        if rid is not None:
            body["rid"] = rid
        try:
            answer = self._http.post("/generate", json=body)
        except httpx.HTTPError as error:
            raise DumpError(f"the server does not answer: {type(error).__name__}: {error}") from None
        if answer.status_code != 200:
            raise DumpError(f"HTTP {answer.status_code}: {_error_text(answer)}")
        return answer.json()

    def capture(
        self, input_ids: list[int], rid: str, *, wait_seconds: float = 60.0, **fields: Any
    ) -> tuple[Dump, dict]:
        """Prefill one sequence, wait for its dump, read and delete it. Returns the dump and the server's answer."""
        answer = self.generate(input_ids, rid=rid, **fields)
        path = self.wait_for_dump(rid, wait_seconds)
        dump = read_dump(path)
        path.unlink()
        return dump, answer

    def capture_many(
        self, sequences: Iterable[tuple[str, list[int]]], num_concurrent: int, **fields: Any
    ) -> dict[str, Dump]:
        """Prefill (rid, input_ids) pairs, `num_concurrent` at a time; the dumps by rid. The first error is raised."""
        with ThreadPoolExecutor(num_concurrent) as pool:
            futures = {rid: pool.submit(self.capture, ids, rid, **fields) for rid, ids in sequences}
            try:
                return {rid: future.result()[0] for rid, future in futures.items()}
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def wait_for_dump(self, rid: str, wait_seconds: float = 60.0) -> Path:
        """The path of a request's dump once it is there; the answer to a request does not prove that it is.

        Raises `DumpError` when the server left an error note, or nothing came in time.
        """
        if self.dump_dir is None:
            raise UserError("this server captures nothing: no dump folder is known", self.url)
        path, note = self.dump_dir / f"{rid}.safetensors", self.dump_dir / f"{rid}.error"
        deadline = time.monotonic() + wait_seconds
        while not path.is_file():
            if note.is_file():
                raise DumpError(json.loads(note.read_text())["error"])
            if time.monotonic() > deadline:
                raise DumpError(f"no dump of {rid} in {self.dump_dir} after {wait_seconds:.0f} s")
            time.sleep(0.002)
        return path


def _error_text(answer: httpx.Response) -> str:
    try:
        body = answer.json()
    except ValueError:
        return answer.text[:300]
    detail = body.get("detail") or body.get("error") or body
    return str(detail.get("message", detail) if isinstance(detail, dict) else detail)[:500]
