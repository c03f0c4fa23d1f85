"""Another Python environment: everything that is installed here, SGLang too, but not this package."""

from __future__ import annotations

import stat
import sys
import sysconfig
from pathlib import Path


def make_other_python(folder: Path) -> tuple[str, str]:
    """An interpreter that reads no `.pth` file, and the PYTHONPATH that gives it the other packages."""
    packages = folder / "packages"
    packages.mkdir(parents=True)
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "eagle3" not in entry.name and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return str(python), str(packages)
