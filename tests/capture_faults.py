"""A test-only SGLang plugin that plants faults into capture inside a real server, chosen by a file's content.

none · shift (layers one too late) · pre_norm (final state from before the norm) · disk_full (writing fails) ·
at the start: allow_unsafe (settings that corrupt capture are not refused) · no_setter (the model has no own capture)
"""

import errno
import os
from pathlib import Path


def register() -> None:
    from eagle3_utils.serving.capture import hooks, recorder, writer

    if "allow_unsafe" in fault():
        hooks.refuse_unsafe = lambda _server_args: None
    if "no_setter" in fault():
        hooks.switch_on = lambda _model, _boundaries: False
    record, begin, write = recorder.Recorder.record, recorder.Recorder.begin, writer.Writer._write

    def faulty_begin(self, requests):
        begin(self, requests)
        if fault() in ("shift", "pre_norm"):
            self.all_tap.attach()

    def faulty_record(self, forward):
        if fault() in ("shift", "pre_norm") and self.all_tap._taken:
            taken = dict(self.all_tap._taken)
            if fault() == "shift":
                boundaries = [next(b for b in taken if taken[b].equal(tensor)) for tensor in forward.aux]
                forward.aux = [taken[boundary + 1] for boundary in boundaries]
            else:
                forward.final = taken[max(taken)]
        record(self, forward)

    def faulty_write(self, job):
        if fault() == "disk_full":
            raise OSError(errno.ENOSPC, "No space left on device (planted)")
        return write(self, job)

    recorder.Recorder.begin, recorder.Recorder.record, writer.Writer._write = faulty_begin, faulty_record, faulty_write


def fault() -> str:
    path = os.environ.get("EAGLE3_TEST_FAULT_FILE")
    return Path(path).read_text().strip() if path else "none"


def install(folder: Path) -> str:
    """Metadata that makes SGLang find this plugin; returns the PYTHONPATH that does it."""
    info = folder / "capture_faults-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: capture_faults\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\ncapture_faults = capture_faults:register\n")
    return os.pathsep.join([str(folder), str(Path(__file__).parent)])
