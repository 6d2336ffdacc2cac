"""A program that runs many cases in one process, for tests that look at what it left."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def results_of(module: str, folder: Path, limit_s: float, **environment: str) -> dict[str, Any]:
    """Run `python -m module FILE` and return the JSON object in FILE: results by case, text for a failure.

    A program that is stopped after limit_s seconds leaves the cases that it reached. AssertionError with its
    output if there are none.
    """
    file, log = folder / "results.json", folder / "log"
    variables = os.environ | {
        "TORCHDYNAMO_DISABLE": "1",  # compiling Megatron's small functions takes longer than all cases
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        **environment,
    }
    command = [sys.executable, "-m", module, str(file)]
    with log.open("w") as out:
        try:
            subprocess.run(
                command, cwd=ROOT, env=variables, stdout=out, stderr=subprocess.STDOUT, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            pass
    assert file.exists(), f"no case ended:\n{log.read_text()[-3000:]}"
    return json.loads(file.read_text())


def found(results: dict[str, Any], name: str) -> Any:
    """A case's result. AssertionError where it failed or was not reached."""
    result = results.get(name, "not reached: the process ended before")
    assert not isinstance(result, str), f"{name}: {result}"
    return result
