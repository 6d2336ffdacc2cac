"""compute-sanitizer over one small forward call.

What a tool reports although the code is right stands in ACCEPTED with the reason; anything else fails.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("sanitized_forward.py")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# tool -> [(pattern of a report and where it was seen, why it is not a fault)]
ACCEPTED: dict[str, list[tuple[str, str]]] = {
    "memcheck": [],
    "racecheck": [
        (
            r"Race reported between (Read|Write) access at mok::ptx::(wait_shared_count|store_release_cta)",
            "a counter written by st.release and polled by ld.acquire, which the tool does not follow",
        )
    ],
    "initcheck": [
        (
            r"Uninitialized __global__ memory read of size 16 bytes.*(reduce_slots|__ldcg)",
            "the slots are written by bulk copies (cp.async.bulk), which the tool does not follow",
        )
    ],
    "synccheck": [],
}
NOT_A_REPORT = re.compile(r"COMPUTE-SANITIZER|SUMMARY|^\s|^$|Target application|Internal Sanitizer")


def sanitizer():
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
    )


@pytest.mark.parametrize("tool", TOOLS)
def test_clean(tool):
    """B08, B20: no access out of bounds, no race, no read of uninitialised memory, no misused barrier."""
    program = sanitizer()
    if program is None:
        pytest.skip("no compute-sanitizer on this machine")
    done = subprocess.run(
        [program, "--tool", tool, sys.executable, str(PROGRAM)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    lines = [line.removeprefix("=========").removeprefix(" ") for line in done.stdout.splitlines()
             if line.startswith("=========")]  # fmt: skip
    if any("not supported" in line or "Unable to" in line for line in lines):
        pytest.skip(f"compute-sanitizer cannot work here: {' '.join(lines)[:300]}")
    # A report is a line; the indented ones below it say where.
    reports: list[str] = []
    for line in lines:
        if not NOT_A_REPORT.search(line):
            reports.append(line)
        elif reports and line.startswith(" "):
            reports[-1] += line
    unexplained = [r for r in reports if not any(re.search(p, r) for p, _ in ACCEPTED[tool])]
    assert unexplained == [], "\n".join(unexplained[:20])
    assert any("SUMMARY" in line for line in lines), done.stdout[-2000:]
    assert "relative error" in done.stdout and done.returncode == 0, done.stdout[-2000:]
