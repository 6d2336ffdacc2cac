"""What ptxas reports about each kernel: kept while compiling, held against csrc/budget.json afterwards.

    ptxas_report.py compile NVCC ARGS...     compiler launcher: runs nvcc, writes OBJECT.ptxas.txt, fails on
                                             serialised WGMMAs
    ptxas_report.py check BUILD_DIR BUDGET   prints a table and fails on a kernel over its budget

The budget file has a "default" and per-kernel entries under "kernels", keyed by a regular expression that is
searched in the demangled name; each holds upper limits for registers (per thread), spill_bytes (stores and
loads) and shared_bytes (static). Standard library only: it also runs inside an isolated wheel build.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

# ptxas calls these "info": a WGMMA that waits for each predecessor costs most of the tensor cores' rate.
SERIALISED_WGMMA = re.compile(r"\(C75\d\d\).*wgmma.*serialized|\(C75(09|10)\)")
STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
LIMITS = ("registers", "spill_bytes", "shared_bytes")


def compile_and_keep(command: list[str]) -> int:
    """Run one nvcc command, keep its ptxas lines beside the object; the exit status."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    shown = [line for line in done.stdout.splitlines() if not is_ptxas_info(line)]
    if shown:
        print("\n".join(shown), flush=True)
    if "-o" in command:
        output = Path(command[command.index("-o") + 1])
        if output.suffix in (".o", ".obj"):
            Path(f"{output}.ptxas.txt").write_text(done.stdout)
    serialised = [line for line in done.stdout.splitlines() if SERIALISED_WGMMA.search(line)]
    if done.returncode == 0 and serialised:
        print(
            "error: ptxas serialises WGMMAs: look for a call or a printf between them, or for accumulators "
            "that are moved (C7520)",
            flush=True,
        )
        print("\n".join(serialised), flush=True)
        return 1
    return done.returncode


def is_ptxas_info(line: str) -> bool:
    return line.startswith(("ptxas info", "    ")) and not SERIALISED_WGMMA.search(line)


def parse(text: str) -> list[dict]:
    """Kernels of one ptxas log: name (mangled), arch, registers, spill_bytes, shared_bytes, stack_bytes."""
    kernels: list[dict] = []
    pending = ""
    for line in text.splitlines():
        if found := re.search(r"Function properties for (\S+)", line):
            pending = found[1]
        elif found := STACK.search(line):
            stack, stores, loads = map(int, found.groups())
            if kernels and kernels[-1]["name"] == pending:  # else a device function that was not inlined
                kernels[-1].update(stack_bytes=stack, spill_bytes=stores + loads)
        elif found := re.search(r"Compiling entry function '(\S+)' for 'sm_(\w+)'", line):
            kernels.append(
                dict(name=found[1], arch=found[2], registers=0, spill_bytes=0, shared_bytes=0, stack_bytes=0)
            )
        elif kernels and (found := re.search(r"Used (\d+) registers", line)):
            kernels[-1]["registers"] = int(found[1])
            if shared := re.search(r"(\d+) bytes smem", line):
                kernels[-1]["shared_bytes"] = int(shared[1])
    return kernels


def demangle(names: list[str]) -> list[str]:
    filt = shutil.which("cu++filt") or shutil.which("c++filt")
    if not names or not filt:
        return names
    done = subprocess.run([filt], input="\n".join(names), text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout.splitlines()


def limit(budget: dict, name: str, key: str) -> int:
    """The last matching entry that names the key decides; otherwise the default."""
    value = budget["default"][key]
    for pattern, entry in budget.get("kernels", {}).items():
        if key in entry and re.search(pattern, name):
            value = entry[key]
    return value


def check(build_dir: Path, budget_file: Path) -> int:
    """Print every kernel under build_dir with its resources; 1 if one is over its budget, else 0."""
    budget = json.loads(budget_file.read_text())
    kernels = [k for log in sorted(build_dir.rglob("*.ptxas.txt")) for k in parse(log.read_text())]
    over = []
    for kernel, name in zip(kernels, demangle([k["name"] for k in kernels]), strict=True):
        print(
            f"sm_{kernel['arch']:<5} {kernel['registers']:>4} registers {kernel['spill_bytes']:>6} B spilled "
            f"{kernel['shared_bytes']:>7} B static shared  {name}"
        )
        for key in LIMITS:
            if kernel[key] > (allowed := limit(budget, name, key)):
                over.append(f"{name} (sm_{kernel['arch']}): {key} got {kernel[key]}, need <= {allowed}")
    if over:
        print(f"over budget, change the kernel or {budget_file}:", *over, sep="\n  ")
    return 1 if over else 0


def main(argv: list[str]) -> int:
    if len(argv) >= 2 and argv[0] == "compile":
        return compile_and_keep(argv[1:])
    if len(argv) == 3 and argv[0] == "check":
        return check(Path(argv[1]), Path(argv[2]))
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
