"""What the extraction client itself can take in: dumps that lie ready, checked, encoded, hashed and stored in shards.

    .venv/bin/python benchmarks/extract_client.py [--gib 2] [--builders 1] [--staging /dev/shm] [--folder FOLDER]

A process of its own plays the server: a request makes a dump that lies ready appear under the request's name, so
nothing but the client works. Beside it, in the same round, a plain copy of the same bytes to the same disk (8 MiB
reads and writes, one file per 2 GiB, synced). The target is a GPU that makes 365,000 tokens/s of SmolLM2 (1.7 GB/s).

Processor time is that of the client process and of the processes that build shards (`--builders`; 0: threads of the
client): per request, and how many tokens/s a process with a core of its own would make.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from eagle3_utils.config import ExtractConfig
from eagle3_utils.corpus.records import Record
from eagle3_utils.states.extract import extract
from eagle3_utils.states.sizes import format_bytes
from eagle3_utils.states.store import StoreMeta

NUM_AUX, HEADER_BYTES = 3, 1016
LAYERS = list(range(NUM_AUX))
CODECS = {"bf16": ("bf16", "all"), "bf16, supervised": ("bf16", "supervised"), "fp8, supervised": ("fp8", "supervised")}


def header(rid: str, num_tokens: int, hidden: int) -> bytes:
    """The first 1,024 bytes of a dump: length, then JSON padded with spaces."""
    entries, position = {"__metadata__": {"rid": rid, "layers": json.dumps(LAYERS)}}, 0
    for name, dtype, shape in (
        ("aux", "BF16", [num_tokens, NUM_AUX, hidden]),
        ("final", "BF16", [num_tokens, hidden]),
        ("input_ids", "I64", [num_tokens]),
    ):
        size = int(np.prod(shape)) * (2 if dtype == "BF16" else 8)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    return HEADER_BYTES.to_bytes(8, "little") + json.dumps(entries).encode().ljust(HEADER_BYTES)


def make_records(total_bytes: int, hidden: int, mean_tokens: int) -> list[Record]:
    """Lognormal lengths, the second half of each sample supervised."""
    rng, records, size = np.random.default_rng(0), [], 0
    while size < total_bytes:
        length = int(np.clip(rng.lognormal(np.log(mean_tokens) - 0.25, 0.7), 16, 8192))
        ids = rng.integers(0, 49_152, length).tolist()
        mask = [int(position >= length // 2) for position in range(length)]
        records.append(Record(f"s{len(records):06d}", "bench", ids, mask))
        size += 2 * hidden * (NUM_AUX + 1) * length
    return records


def make_dumps(folder: Path, records: list[Record], hidden: int) -> int:
    """Lay a dump ready for every record; returns their bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    values = np.random.default_rng(1).standard_normal(1 << 22).astype(np.float32)
    block = np.resize((values.view(np.uint32) >> 16).astype(np.uint16), 8192 * hidden * (NUM_AUX + 1))
    total = 0
    for record in records:
        length = len(record.input_ids)
        with open(folder / f"ready-{record.id}", "wb") as file:
            file.write(header("", length, hidden))
            file.write(block[: length * hidden * (NUM_AUX + 1)])
            file.write(np.array(record.input_ids, np.int64))
            total += file.tell()
    return total


def serve(folder: Path, lengths: dict[str, int], hidden: int, port) -> None:
    """The stand-in server, in a process of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def log_message(self, *_):
            pass

        def do_POST(self):
            rid = self.rfile.read(int(self.headers["Content-Length"]))[:300].split(b'"', 4)[3].decode()
            name = rid.split("-")[2]
            ready = folder / f"ready-{name}"
            with open(ready, "r+b") as file:
                file.write(header(rid, lengths[name], hidden))
            ready.rename(folder / f"{rid}.safetensors")
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

    class Server(ThreadingHTTPServer):
        request_queue_size, daemon_threads = 512, True

    with Server(("127.0.0.1", 0), Handler) as server:
        port.send(server.server_address[1])
        server.serve_forever()


def copy_plainly(source: Path, target: Path) -> None:
    """All dumps end to end into files of about 2 GiB, synced."""
    target.mkdir(parents=True)
    buffer, output, size = memoryview(bytearray(1 << 23)), None, 0
    for path in sorted(source.iterdir()):
        if output is None or size >= 2 << 30:
            if output is not None:
                os.fsync(output.fileno())
                output.close()
            output, size = open(target / f"{path.name}.copy", "wb", buffering=0), 0  # noqa: SIM115 closed when full
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                output.write(buffer[:count])
                size += count
    os.fsync(output.fileno())
    output.close()


def timed(work) -> tuple[float, float]:
    """(seconds, processor seconds of this process)."""
    started, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - started, time.process_time() - used


def run(arguments, records: list[Record], codec: tuple[str, str]) -> dict:
    """One round: a plain copy and an extraction of the same dumps."""
    staging, folder = arguments.staging / "bench-dumps", arguments.folder
    num_bytes = make_dumps(staging, records, arguments.hidden)
    meta = StoreMeta(arguments.hidden, LAYERS, codec=codec[0], final=codec[1])
    config = ExtractConfig(
        staging_max_bytes=arguments.staging_bytes,
        max_tokens_in_flight=arguments.tokens_in_flight,
        min_free_bytes=0,
        shard_builders=arguments.builders,
    )
    here, there = multiprocessing.Pipe()
    lengths = {record.id: len(record.input_ids) for record in records}
    server = multiprocessing.Process(target=serve, args=(staging, lengths, arguments.hidden, there), daemon=True)
    server.start()
    try:
        shutil.rmtree(folder, ignore_errors=True)
        copied = timed(lambda: copy_plainly(staging, folder / "copy"))
        shutil.rmtree(folder)
        address = SimpleNamespace(url=f"http://127.0.0.1:{here.recv()}", dump_dir=staging, handshake=None)
        reports = []
        seconds, _ = timed(lambda: reports.append(extract([address], records, folder, meta, config)))
        stored = seconds, reports[0].client_cpu_seconds, reports[0].builders_cpu_seconds
    finally:
        server.kill()
        server.join()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(staging)
    return {"bytes": num_bytes, "tokens": sum(lengths.values()), "copied": copied, "stored": stored}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--mean-tokens", type=int, default=1554)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--builders", type=int, default=None, help="shard_builders; left out: by the number of cores")
    parser.add_argument("--tokens-in-flight", type=int, default=262_144)
    parser.add_argument("--staging", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--staging-bytes", type=int, default=4 << 30)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/bench-client"), help="the disk of the store")
    arguments = parser.parse_args()
    records = make_records(int(arguments.gib * 2**30), arguments.hidden, arguments.mean_tokens)
    print(f"{len(records)} dumps, {os.cpu_count()} cores; staging {arguments.staging}, store {arguments.folder}")
    for name, codec in CODECS.items():
        rounds = [run(arguments, records, codec) for _ in range(arguments.rounds)]
        best = min(rounds, key=lambda one: one["stored"][0])
        seconds = best["stored"][0]
        client, builders = (statistics.median(one["stored"][which] for one in rounds) for which in (1, 2))
        ratio = statistics.median(one["copied"][0] / one["stored"][0] for one in rounds)
        processor = statistics.median(sum(one["stored"][1:]) / one["copied"][1] for one in rounds)
        print(
            f"{name:18} {format_bytes(best['bytes'])} in {seconds:.2f} s: {best['tokens'] / seconds:,.0f} tokens/s, "
            f"{best['bytes'] / seconds / 1e9:.2f} GB/s of dumps, {ratio:.2f} x a plain copy; processor time "
            f"{processor:.2f} x the copy's\n{'':18} per request {client / len(records) * 1e3:.2f} ms in the client, "
            f"{builders / len(records) * 1e3:.2f} ms in builders; a core makes "
            + " and ".join(f"{best['tokens'] / used:,.0f} tokens/s" for used in (client, builders) if used),
            flush=True,
        )


if __name__ == "__main__":
    main()
