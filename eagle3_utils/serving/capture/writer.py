"""Writer threads: a finished slab becomes `DUMP_DIR/<rid>.safetensors`, written under another name and renamed.

The file is laid out here rather than by the safetensors library, which copies every tensor twice on its way out; a
slab already holds the tensors in file order, so a dump is one `writev`. Dumps are staging, not storage: no fsync.
"""

import json
import logging
import os
import queue
import threading
from dataclasses import dataclass

import torch

from .rows import RequestRows
from .staging import Staging

logger = logging.getLogger(__name__)
_MAX_WRITE_BYTES = 1 << 30  # the kernel takes at most 2 GiB - 4 KiB in one call


@dataclass
class Job:
    rid: str
    slab: torch.Tensor
    num_bytes: int
    header: bytes
    ready: torch.cuda.Event | None  # fires when the slab is filled; None on the CPU, where it already is


class Writer:
    """Threads that write dumps. `failure` is why the last one could not be written, or None.

    Parameters
    ----------
    device_id : the GPU whose copies fill the slabs. A new thread starts on GPU 0, and waiting for another GPU's event
        there may make a context on it, some hundred megabytes for every rank.
    """

    def __init__(self, dump_dir: str, staging: Staging, num_threads: int, device_id: int | None = None):
        self.dump_dir, self.staging, self.device_id = dump_dir, staging, device_id
        self.failure: str | None = None
        self._queue: queue.Queue[Job] = queue.Queue()
        for number in range(num_threads):
            threading.Thread(target=self._work, name=f"hs-writer-{number}", daemon=True).start()

    def submit(self, rows: RequestRows, metadata: dict[str, str], ready: torch.cuda.Event | None) -> None:
        """Queue a complete request; its slab returns to the pool once the file is there."""
        job = Job(rows.rid, rows.hand_over(), rows.num_bytes, rows.header(metadata), ready)
        self.staging.queued()
        self._queue.put(job)

    def check(self) -> str | None:
        """Why a dump would not be written now, or None. A full disk counts only while it stays full."""
        if self.failure is None:
            return None
        status = os.statvfs(self.dump_dir) if os.path.isdir(self.dump_dir) else None
        if status is not None and status.f_bavail * status.f_frsize > self.staging.peak_bytes + (64 << 20):
            logger.warning("[HS_DUMP] there is room again: capture goes on")
            self.failure = None
        return self.failure

    def _work(self) -> None:
        if self.device_id is not None:
            torch.cuda.set_device(self.device_id)
        while True:
            job = self._queue.get()
            path = None
            try:
                if job.ready is not None:
                    job.ready.synchronize()
                path = self._write(job)
            except (OSError, RuntimeError) as error:
                self.failure = f"the dump of {job.rid} could not be written: {error}"
                logger.error("[HS_DUMP] %s", self.failure)
                self._leave_error(job.rid, self.failure)
            finally:
                self.staging.written(job.slab, path, job.num_bytes)

    def _write(self, job: Job) -> str:
        path = os.path.join(self.dump_dir, f"{job.rid}.safetensors")
        data = memoryview(job.slab.numpy())[: job.num_bytes]
        file = os.open(f"{path}.tmp", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(file, job.header)
            _write_all(file, data)
        except OSError:
            os.unlink(f"{path}.tmp")
            raise
        finally:
            os.close(file)
        os.rename(f"{path}.tmp", path)
        return path

    def _leave_error(self, rid: str, message: str) -> None:
        try:
            with open(os.path.join(self.dump_dir, f"{rid}.error"), "w") as file:
                json.dump({"rid": rid, "error": message}, file)
        except OSError as error:
            logger.error("[HS_DUMP] nor could a note about it: %s", error)


def _write_all(file: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view[:_MAX_WRITE_BYTES]) :]
