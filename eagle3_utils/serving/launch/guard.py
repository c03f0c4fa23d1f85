"""Kills a server when the process that launched it dies: `python guard.py PROCESS_GROUP [DUMP_FOLDER]`, stdin a pipe.

The pipe closes when the launcher ends, however it ends (a killed notebook kernel cannot clean up). If the launcher
stopped the server itself it says so first. Standard library only; runs with `-S -E`, so it costs a few megabytes.
"""

import glob
import os
import signal
import sys
import time

GRACE_SECONDS = 1.0


def main() -> None:
    group = int(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.stdin.buffer.read().strip() == b"stopped":
        return
    for sign, pause in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, 0.0)):
        try:
            os.killpg(group, sign)
        except ProcessLookupError:
            break
        time.sleep(pause)
    for folder in sys.argv[2:]:  # dumps in /dev/shm are memory, and nobody will take them now
        for pattern in ("hs-*", "handshake*"):
            for path in glob.glob(os.path.join(glob.escape(folder), pattern)):
                os.unlink(path)


if __name__ == "__main__":
    main()
