"""The Megatron flags of a model in configs/models: `python tools/model_flags.py deepseek-v3`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

MODELS = Path(__file__).resolve().parent.parent / "configs" / "models"


def model_flags(name: str) -> list[str]:
    """Command-line arguments for the model; ValueError if configs/models has no such file."""
    file = MODELS / f"{name}.json"
    if not file.exists():
        raise ValueError(f"model: got {name!r}, need one of {sorted(f.stem for f in MODELS.glob('*.json'))}")
    arguments = []
    for flag, value in json.loads(file.read_text())["flags"].items():
        arguments += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
    return arguments


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(*model_flags(sys.argv[1]))
