"""A real disk of a few hundred KiB: a tmpfs, where mounting is permitted; elsewhere the test is skipped."""

import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_kib: int):
    """Mount a tmpfs of this size; yields a function that gives it another size."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_kib}k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here: {mounted.stderr.strip()}")

    def resize(num_kib: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={num_kib}k", str(folder)], check=True)

    try:
        yield resize
    finally:
        subprocess.run(["umount", str(folder)], check=True)
