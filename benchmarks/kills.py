"""Kill -9 at random moments of a real extraction: the client again and again, the server once, in between and at work.

    .venv/bin/python benchmarks/kills.py [--kills 20] [--samples 400] [--folder outputs/bench-kills]
    .venv/bin/python benchmarks/kills.py --builders 1 --seconds 25     # shards built by a process, which starts slowly

SmolLM2 on the CPU with the real plugin; staging has just the room the longest sample needs, so that shards are closed
all the time and capture often waits. At the end every sample must be stored once, with its own ids, whole shards must
be as they were when they were first seen, and the states must be those of an undisturbed extraction (not bit by bit:
batches differ).
"""

import argparse
import multiprocessing
import os
import random
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from eagle3_utils.config import ExtractConfig, ProbeConfig
from eagle3_utils.corpus.records import Record
from eagle3_utils.errors import UserError
from eagle3_utils.runs import hash_files
from eagle3_utils.serving.server import Server, capture_spec
from eagle3_utils.states import extract as extract_module
from eagle3_utils.states.extract import extract
from eagle3_utils.states.reader import StoreReader
from eagle3_utils.states.shards.ledger import Ledger
from eagle3_utils.states.shards.verify import verify_store
from eagle3_utils.states.sizes import STAGING_SHARES, dump_bytes_per_token
from eagle3_utils.states.store import StoreMeta
from eagle3_utils.target import load_target

LONGEST, NUM_AUX = 50, 3  # 1.15 MB of staging


def make_records(num: int, vocab_size: int) -> list[Record]:
    rng = np.random.default_rng(0)
    lengths = [LONGEST, *rng.integers(4, LONGEST, num - 1)]
    return [
        Record(f"s{number:05d}", "kills", rng.integers(0, vocab_size, length).tolist(), [1] * int(length))
        for number, length in enumerate(lengths)
    ]


def client(url: str, dump_dir: Path, nonce: str, store: Path, records, meta: StoreMeta, config: ExtractConfig) -> None:
    """What the killed process runs; it gives up a dead server after a second."""
    extract_module.SERVER_PATIENCE_SECONDS = 1.0
    server = SimpleNamespace(url=url, dump_dir=dump_dir, handshake={"nonce": nonce})
    try:
        extract([server], records, store, meta, config)
    except UserError as error:
        print(f"  client: {error}", flush=True)
        raise SystemExit(1) from None


class Scene:
    """A store that is being made: starts servers and clients, and watches that finished shards never change."""

    def __init__(self, arguments, folder: Path):
        self.target, self.folder = load_target("example"), folder
        layers = [1, 14, 26]
        builders = arguments.builders
        staging = STAGING_SHARES * LONGEST * dump_bytes_per_token(self.target.hidden_size, NUM_AUX) + (64 << 10)
        self.records = make_records(arguments.samples, self.target.vocab_size)
        self.meta = StoreMeta(self.target.hidden_size, layers, final="all", fingerprint="kills")
        self.config = ExtractConfig(staging_max_bytes=staging, min_free_bytes=0, shard_builders=builders)
        options = {"run_dir": str(folder / "run"), "device": "cpu", "max_seq_len": 256, "staging_max_bytes": staging}
        self.options = ProbeConfig(**options, aux_layers=layers)
        self.seen: dict[str, str] = {}

    def server(self) -> Server:
        spec = capture_spec(self.options, self.target, "kills")
        return Server(self.options, self.target, self.folder / "server.log", self.folder / "run", spec)

    def start_client(self, server: Server, store: Path) -> multiprocessing.Process:
        context = multiprocessing.get_context("forkserver")  # imports once: a start costs milliseconds
        arguments = (server.url, server.dump_dir, server.nonce, store, self.records, self.meta, self.config)
        process = context.Process(target=client, args=arguments)
        process.start()
        return process

    def watch(self, store: Path) -> int:
        """Remember what finished shards hold, and that those remembered are untouched; returns samples done."""
        if not (store / "ledger.sqlite").is_file():
            return 0
        with Ledger(store / "ledger.sqlite") as ledger:  # a writer's: a killed one leaves a journal to play back
            finished, done = ledger.shards(), ledger.counts()["done"]
        for number in finished:
            path = store / f"shard-{number:06d}.h5"
            assert hash_files([path]) == self.seen.setdefault(path.name, hash_files([path])), f"{path.name} changed"
        return done


def kill_clients(scene: Scene, server: Server, store: Path, kills: int, longest: float, rng: random.Random) -> int:
    """Kill the client so many times (fewer when it is done before); returns the kills that hit one at work."""
    hits = 0
    for _ in range(kills):
        process = scene.start_client(server, store)
        process.join(rng.uniform(0.3, longest))  # importing, waiting for the first batch, closing shards
        process.kill()
        process.join()
        hits += process.exitcode == -signal.SIGKILL
        print(f"  killed (exit {process.exitcode}), {scene.watch(store)} of {len(scene.records)} stored", flush=True)
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--builders", type=int, default=0, help="processes that build shards; 0: threads of the client")
    parser.add_argument("--seconds", type=float, default=10.0, help="a client lives at most so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("outputs/bench-kills"))
    arguments = parser.parse_args()
    folder, rng = arguments.folder.resolve(), random.Random(arguments.seed)
    shutil.rmtree(folder, ignore_errors=True)
    scene, store, clean = Scene(arguments, folder), folder / "store", folder / "clean"
    with scene.server() as server:
        hits = kill_clients(scene, server, store, arguments.kills // 2, arguments.seconds, rng)
        process = scene.start_client(server, store)
        process.join(rng.uniform(0.05, 0.5) * arguments.seconds)
        os.killpg(server.pid, signal.SIGKILL)
        process.join()
        print(f"  server killed; the client ended with {process.exitcode}, {scene.watch(store)} stored", flush=True)
    with scene.server() as server:
        hits += kill_clients(scene, server, store, arguments.kills - arguments.kills // 2, arguments.seconds, rng)
        for last in (store, clean):
            process = scene.start_client(server, last)
            process.join()
            assert process.exitcode == 0
        leftovers = list(server.dump_dir.glob("hs-*"))
    assert scene.watch(store) == len(scene.records) and not leftovers
    verify_store(store, deep=True).require()
    worst = compare(StoreReader(store), StoreReader(clean), scene.records)
    print(
        f"{hits} kills of a client at work and one of the server: {len(scene.records)} samples in {len(scene.seen)} "
        f"shards, 0 lost, 0 doubled, 0 shards changed; states differ by {worst:.2%} at most from an undisturbed run"
    )
    shutil.rmtree(folder)


def compare(got: StoreReader, want: StoreReader, records: list[Record]) -> float:
    """The largest relative difference of a sample's states; ids and tokens must be equal."""
    assert got.ids == want.ids == sorted(record.id for record in records)
    worst = 0.0
    for record in records:
        one, two = (reader.read(reader.index_of(record.id)) for reader in (got, want))
        assert one.input_ids.tolist() == two.input_ids.tolist() == record.input_ids
        for mine, other in ((one.aux, two.aux), (one.final, two.final)):
            worst = max(worst, float((mine.float() - other.float()).norm() / other.float().norm()))
    assert worst < 0.05, worst
    return worst


if __name__ == "__main__":
    main()
