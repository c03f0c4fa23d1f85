"""What a server should capture, and where its dumps go."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import xxhash

from eagle3_utils.config import CaptureOptions
from eagle3_utils.errors import UserError
from eagle3_utils.runs import resolve_path
from eagle3_utils.target import Target, default_aux_layers


@dataclass(frozen=True)
class CaptureSpec:
    """What the server should capture, and where.

    Parameters
    ----------
    aux_layers : rising 0-based decoder layers whose output is captured.
    dump_dir : folder for dumps; made, and emptied of stale ones, at launch.
    max_bytes : capture waits while dumps that nobody took hold this much.
    """

    aux_layers: list[int]
    dump_dir: Path
    max_bytes: int = 4 << 30

    @property
    def boundaries(self) -> list[int]:
        return [layer + 1 for layer in self.aux_layers]


def capture_spec(options: CaptureOptions, target: Target, name: str = "dumps") -> CaptureSpec:
    """The capture a stage's parameters ask for; dumps go to /dev/shm where there is one."""
    layers = options.aux_layers or default_aux_layers(target.num_layers)
    highest = target.num_layers - 2  # SGLang (but for Gemma) hands no draft what leaves the last layer
    if layers != sorted(set(layers)) or not 0 <= layers[0] <= layers[-1] <= highest:
        fix = "SGLang hands no draft the last layer's output" if layers[-1] == highest + 1 else None
        raise UserError(f"aux_layers {layers} must rise and lie in 0…{highest}", "aux_layers", fix, exit_code=2)
    run = xxhash.xxh3_64_hexdigest(str(resolve_path(options.run_dir)).encode())
    if options.staging_dir:
        base = resolve_path(options.staging_dir)
    else:
        base = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
    return CaptureSpec(list(layers), base / f"eagle3-{run}-{name}", options.staging_max_bytes)
