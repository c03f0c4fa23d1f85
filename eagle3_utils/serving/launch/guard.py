"""Kills a server when the process that launched it dies: `python guard.py PROCESS_GROUP`, with a pipe as stdin.

The pipe closes when the launcher ends, however it ends (a killed notebook kernel cannot clean up). If the launcher
stopped the server itself it says so first. Standard library only; runs with `-S -E`, so it costs a few megabytes.
"""

import os
import signal
import sys
import time

GRACE_SECONDS = 5.0


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
            return
        time.sleep(pause)


if __name__ == "__main__":
    main()
