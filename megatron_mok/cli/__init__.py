"""The `mok` command. Python 3.9 and its standard library alone: `mok doctor` runs wherever Python does."""

from __future__ import annotations

import sys
from importlib import import_module

# name: (module with `run(argv) -> exit code`, one line of help)
COMMANDS = {
    "doctor": ("megatron_mok.cli.doctor", "check this machine: what is found, what is needed, the remedy"),
    "ab": ("megatron_mok.cli.ab", "the same training under another dispatcher and under mok, compared"),
    "bench": ("megatron_mok.cli.bench", "one layer on this GPU: mok beside torch and other kernels"),
}


def usage() -> str:
    lines = ["usage: mok COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<8} {help_line}" for name, (_, help_line) in COMMANDS.items()]
    return "\n".join([*lines, "", "`mok COMMAND --help` lists the options of a command."])


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the exit code (2 for a command line that makes no sense)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"mok: got command {argv[0]!r}, need one of: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[argv[0]]
    try:
        return import_module(module).run(argv[1:])
    except KeyboardInterrupt:
        return 130
