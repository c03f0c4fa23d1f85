"""The SGLang plugin that leaves the hidden states of wanted requests in a folder.

SGLang finds `register` through the entry-point group `sglang.srt.plugins` and calls it in every one of its processes.
Without `SGLANG_HS_DUMP_DIR` in the environment nothing is imported and nothing is wrapped.

    SGLANG_HS_DUMP_DIR    folder for the dumps and the handshake
    SGLANG_HS_LAYERS      JSON list of 0-based decoder layers whose output is captured
    SGLANG_HS_DTYPE       of the dumped states (default bfloat16)
    SGLANG_HS_NONCE       comes back in the handshake and in every dump: proves that the server is the one just launched
                          (default: another at each start, so that a restart shows)
    SGLANG_HS_MAX_BYTES   capture waits while dumps that nobody took hold this much (default 4 GiB)
    SGLANG_HS_POOL_BYTES  host memory for rows on their way to a file (default 2 GiB)
    SGLANG_HS_WAIT_SECONDS  after so long a wait a request is answered with an error (default 120)
    SGLANG_HS_WRITERS     writer threads (default 2)

A request is wanted when its `rid` starts with `hs-`; one that starts with `hs-all-` also leaves every boundary.
This package must stay importable on its own, inside any SGLang's interpreter: torch and the standard library only.
"""

import os
import secrets


def register() -> None:
    """Entry point: install the hooks when this server was started for extraction."""
    if not os.environ.get("SGLANG_HS_DUMP_DIR"):
        return
    if not os.environ.get("SGLANG_HS_NONCE"):  # the main process is asked first; its children inherit this
        os.environ["SGLANG_HS_NONCE"] = secrets.token_hex(8)
    from . import hooks  # imports SGLang: only in a server that captures

    hooks.install()
