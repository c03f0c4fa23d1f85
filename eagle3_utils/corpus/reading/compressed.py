"""Plain, gzip and zstd files opened alike, and the errors by which a damaged one gives itself away.

gzip has checksums; zstd frames may have one. Without it damage inside a frame may give other bytes instead of an error.
"""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

import zstandard

READ_ERRORS = (OSError, EOFError, zlib.error, zstandard.ZstdError)  # what reading a damaged file raises
_BLOCK = 1 << 20  # read at once


def open_bytes(path: Path) -> io.BufferedIOBase:
    """Open a plain, gzip or zstd file for reading."""
    if path.name.endswith(".gz"):
        return gzip.open(path, "rb")
    if path.name.endswith(".zst"):
        return io.BufferedReader(_ZstdFile(path), _BLOCK)
    return open(path, "rb", buffering=_BLOCK)


class _ZstdFile(io.RawIOBase):
    """All frames of a zstd file; `EOFError` where the last one is cut, which zstandard's own reader does not tell."""

    def __init__(self, path: Path):
        self._file, self._frame, self._text = open(path, "rb"), None, memoryview(b"")  # noqa: SIM115 (see close)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._text:
            ended = self._frame is None or self._frame.eof
            block = (self._frame.unused_data if self._frame and ended else b"") or self._file.read(_BLOCK >> 6)
            if not block:
                if not ended:
                    raise EOFError("the zstd frame is cut")
                return 0
            if ended:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._text = memoryview(self._frame.decompress(block))
        size = min(len(buffer), len(self._text))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()
