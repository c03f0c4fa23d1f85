"""A recorder without a server, fed with forwards whose rows say whose they are; and stand-ins for models' layers."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from eagle3_utils.serving.capture.recorder import Forward, Recorder, boundaries_json
from eagle3_utils.serving.capture.staging import Staging
from eagle3_utils.serving.capture.writer import Writer
from eagle3_utils.serving.client import read_dump

L, H = 2, 8
LARGE = 1 << 30


class Request(SimpleNamespace):
    """A subclass, so that it can be referred to weakly."""


def request(rid: str, num_tokens: int) -> Request:
    return Request(rid=rid, origin_input_ids=list(range(num_tokens)))


class FakeRun:
    """A recorder fed with forwards whose rows carry their own request and position as values."""

    def __init__(self, folder: Path, max_bytes: int = LARGE, wait_seconds: float = 5.0, num_aux: int = L):
        self.folder = folder
        self.staging = Staging(max_bytes, max_bytes, pin=False, wait_seconds=wait_seconds)
        self.writer = Writer(str(folder), self.staging, num_threads=1)
        self.recorder = Recorder(self.staging, self.writer, num_aux, boundaries_json([2, 3]), torch.float32)

    def forward(self, pieces: list[tuple[SimpleNamespace, int, int]], padding: int = 0) -> None:
        """One batch: (request, prefix, extend) each; row values are rid number * 1000 + position."""
        self.recorder.begin([req for req, _, _ in pieces])
        values = [int(req.rid[-1]) * 1000 + p for req, prefix, extend in pieces for p in range(prefix, prefix + extend)]
        ids = torch.tensor(values + [0] * padding)
        rows = ids[:, None].float().expand(-1, H)
        self.recorder.record(
            Forward(
                [req.rid for req, _, _ in pieces],
                [prefix for _, prefix, _ in pieces],
                [extend for _, _, extend in pieces],
                ids,
                rows.contiguous(),
                [(rows + 0.25 * (layer + 1)).contiguous() for layer in range(L)],
            )
        )

    def dump(self, rid: str, seconds: float = 5.0):
        path, deadline = self.folder / f"{rid}.safetensors", time.monotonic() + seconds
        while not path.exists():
            assert time.monotonic() < deadline, f"no dump of {rid}"
            time.sleep(0.005)
        return read_dump(path)


def assert_is_whole(dump, number: int, num_tokens: int) -> None:
    expected = torch.arange(num_tokens) + 1000 * number
    assert dump.input_ids.tolist() == expected.tolist()
    assert torch.equal(dump.final, expected[:, None].float().expand(-1, H))
    for layer in range(L):
        assert torch.equal(dump.aux[:, layer], dump.final + 0.25 * (layer + 1))


class FakeLayer(nn.Module):
    def forward(self, positions, hidden_states, forward_batch, residual):
        residual = hidden_states if residual is None else hidden_states + residual
        return torch.ones_like(residual), residual


class FakeNorm(nn.Module):
    def forward(self, x, residual=None):
        return x if residual is None else x + residual


class FakeDecoder(nn.Module):
    """Each layer adds 1 to the sum of hidden and residual, so boundary b holds start + b."""

    def __init__(self, num_layers: int = 6):
        super().__init__()
        self.layers = nn.ModuleList(FakeLayer() for _ in range(num_layers))
        self.norm = FakeNorm()
        self.layers_to_capture: list[int] = []

    def forward(self, hidden):
        residual, captured = None, []
        for number, layer in enumerate(self.layers):
            if number in self.layers_to_capture:
                captured.append(hidden + residual)
            hidden, residual = layer(None, hidden, None, residual)
        return self.norm(hidden, residual), captured


class LlamaLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = FakeDecoder()

    def set_eagle3_layers_to_capture(self, ids):
        self.model.layers_to_capture = [value + 1 for value in ids]


class DeepseekLike(LlamaLike):
    def set_eagle3_layers_to_capture(self, ids):
        self.model.layers_to_capture = [value + 1 for value in ids] if ids[0] == 1 else list(ids)


class FlaggedLike(LlamaLike):
    def set_eagle3_layers_to_capture(self, ids):
        self.model.layers_to_capture = [value + 1 for value in ids]
        for boundary in self.model.layers_to_capture:
            self.model.layers[boundary]._is_layer_to_capture = True
