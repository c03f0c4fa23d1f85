"""A stand-in for an SGLang server with the capture plugin: answers /generate and leaves dumps as the contract says.

The states are a known function of the token ids, so a test can tell every stored bit. `fault(record_id, attempt)`
may name what goes wrong with a request.
"""

import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import h5py
import numpy as np
import torch
from safetensors.torch import save_file

from eagle3_utils.states.store import Sample, StoreMeta, StoreWriter

NUM_AUX, HIDDEN = 3, 16
SMALL_SHARD = 60_000  # about ten samples


@dataclass
class Record:
    """The four fields of the training record."""

    id: str
    source: str
    input_ids: list[int]
    loss_mask: list[int]


def make_records(num: int, seed: int = 0, longest: int = 60) -> list[Record]:
    rng = np.random.default_rng(seed)
    records = []
    for number in range(num):
        length = int(rng.integers(2, longest))
        mask = [0, *(rng.random(length - 1) < 0.5).astype(int).tolist()]
        source = ("chat", "maths")[number % 2]
        records.append(Record(f"{source}-{number:04d}", source, rng.integers(0, 900, length).tolist(), mask))
    return records


def states_of(input_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(aux [T, L, H], final [T, H]) in bf16: a token's own pattern, times its position."""
    ids = torch.tensor(input_ids, dtype=torch.float32)
    grid = torch.arange(1, (NUM_AUX + 1) * HIDDEN + 1).reshape(NUM_AUX + 1, HIDDEN)
    states = torch.sin(ids[:, None, None] * grid * 0.37 + torch.arange(len(ids))[:, None, None]).bfloat16()
    return states[:, :NUM_AUX].contiguous(), states[:, NUM_AUX].contiguous()


class FakeServer:
    """`with FakeServer(folder, fault) as server:` has url, dump_dir, handshake like the real one."""

    def __init__(self, dump_dir: Path, fault=lambda rid: None, delay_seconds: float = 0.0):
        self.dump_dir, self.fault, self.delay_seconds = Path(dump_dir), fault, delay_seconds
        self.dump_dir.mkdir(parents=True, exist_ok=True)
        self.handshake = {"nonce": "n1"}
        self.rids: list[str] = []
        self.answered_at_stop = 0
        self._stopping = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        if not self._stopping.is_set():
            self._stopping.set()
            self._server.shutdown()
            self._server.server_close()

    def _handler(self):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.rids.append(body["rid"])
                fault = outer.fault(body["rid"])
                outer._stopping.wait(outer.delay_seconds)
                if fault == "die" or outer._stopping.is_set():
                    self.close_connection = True
                    self.connection.close()
                    return
                if fault == "hang":
                    outer._stopping.wait(30)
                    return
                if fault == "http 500":
                    return self.answer(500, b"out of memory")
                outer.dump(body["rid"], body["input_ids"], fault)
                self.answer(200, b"{}")

            def answer(self, status: int, content: bytes):
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        return Handler

    def dump(self, rid: str, input_ids: list[int], fault: str | None) -> None:
        if fault == "no dump":
            (self.dump_dir / f"{rid}.error").write_text("no room")
            return
        aux, final = states_of(input_ids)
        if fault == "nan":
            aux[-1, 1, 3] = float("nan")
        ids = torch.tensor(input_ids, dtype=torch.int64)
        if fault == "other ids":
            ids[-1] += 1
        layers = [1, 2, 4] if fault == "other layers" else [1, 2, 3]
        nonce = "n0" if fault == "other server" else "n1"
        metadata = {"rid": rid, "num_tokens": str(len(ids)), "layers": json.dumps(layers), "nonce": nonce}
        path = self.dump_dir / f"{rid}.safetensors"
        save_file({"aux": aux, "final": final, "input_ids": ids}, f"{path}.tmp", metadata)
        if fault == "truncated":
            with open(f"{path}.tmp", "r+b") as file:
                file.truncate(200)
        Path(f"{path}.tmp").rename(path)


def store_meta(**changes) -> StoreMeta:
    """The meta of a store of these states."""
    return StoreMeta(**{"hidden_size": HIDDEN, "aux_layers": [1, 2, 3], "fingerprint": "f", **changes})


def sample_of(record) -> Sample:
    """A record with its states."""
    aux, final = states_of(record.input_ids)
    ids, mask = np.array(record.input_ids, np.int32), np.array(record.loss_mask, np.uint8)
    return Sample(record.id, ids, mask, aux, final, source=record.source)


def fill(folder, records, **changes) -> None:
    """Store all records in shards of about ten samples."""
    with StoreWriter(folder, store_meta(**changes), SMALL_SHARD) as writer:
        writer.register(records)
        for record in records:
            writer.add(sample_of(record))


def flip_a_byte(path, dataset="aux", row=0) -> None:
    """Damage one sample of a shard, in its states."""
    with h5py.File(path) as file:
        position = file[dataset].id.get_offset() + int(file["offsets"][row]) * file[dataset][0].nbytes + 5
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x10]))
