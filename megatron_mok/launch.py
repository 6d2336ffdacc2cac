"""Run an unmodified training script with the dispatcher "mok" registered.

    torchrun ... -m megatron_mok.launch pretrain_gpt.py ... --moe-token-dispatcher-type mok

The script's folder comes first on sys.path, as when Python runs it, and its arguments are its own.
"""

from __future__ import annotations

import os
import runpy
import sys


def main(argv: list[str] | None = None) -> None:
    """`argv`: the script and its arguments (default: this process's). Exits with status 2 without a
    script."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or not os.path.isfile(argv[0]):
        got = repr(argv[0]) + " is no file" if argv else "no script"
        print(f"usage: python -m megatron_mok.launch SCRIPT [ARGUMENTS]   (got: {got})", file=sys.stderr)
        raise SystemExit(2)
    script = os.path.abspath(argv[0])
    sys.path.insert(0, os.path.dirname(script))
    sys.argv = [script, *argv[1:]]

    from .mcore import register

    register()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
