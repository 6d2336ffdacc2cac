"""compute-sanitizer over small forward and backward calls.

What a tool reports although the code is right stands in ACCEPTED with the reason; anything else fails.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# name: program and its arguments
PROGRAMS = {
    "forward": ("sanitized_forward.py",),
    "backward-1-rank": ("sanitized_backward.py", "1"),
    "backward-2-ranks": ("sanitized_backward.py", "2"),
}
TAKE_TURNS = 77  # of sanitized_backward.py
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# tool -> [(pattern of a report and where it was seen, why it is not a fault)]
ACCEPTED: dict[str, list[tuple[str, str]]] = {
    "memcheck": [],
    "racecheck": [
        (
            r"Race reported between (Read|Write) access at mok::ptx::(wait_shared_count|store_release_cta)",
            "a counter written by st.release and polled by ld.acquire, which the tool does not follow",
        ),
        (
            r"Race reported between Write access at mok::ptx::store_cluster.* and Read access at .*next_tile"
            r"|Race reported between Read access at .*next_tile.* and Write access at .*store_cluster",
            "a tile's description, told by an mbarrier of the cluster, which the tool does not follow",
        ),
        (
            r"Potential invalid __shared__ write .* at mok::ptx::store_cluster.*might have already exited",
            "the same, now and then; both blocks of a cluster leave behind a cluster barrier at the end",
        ),
    ],
    "initcheck": [],
    "synccheck": [],
}
NOT_A_REPORT = re.compile(r"COMPUTE-SANITIZER|SUMMARY|^\s|^$|Target application|Internal Sanitizer")


def sanitizer():
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
    )


def run(program, *wrapper):
    file, *arguments = PROGRAMS[program]
    return subprocess.run(
        [*wrapper, sys.executable, str(HERE / file), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )


def unexplained(tool, lines):
    """The reports that no entry of ACCEPTED explains. A report is a line; indented ones below say where."""
    reports: list[str] = []
    for line in lines:
        if not NOT_A_REPORT.search(line):
            reports.append(line)
        elif reports and line.startswith(" "):
            reports[-1] += line
    return [r for r in reports if not any(re.search(pattern, r) for pattern, _ in ACCEPTED[tool])]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_program_is_right_by_itself(program):
    done = run(program)
    assert done.returncode == 0 and "relative error" in done.stdout, done.stdout[-2000:]


# Two ranks take minutes under a tool; what they have beside one rank is access to each other's memory.
RUNS = [(p, t) for p in PROGRAMS for t in TOOLS if p != "backward-2-ranks" or t == "memcheck"]


@pytest.mark.parametrize(("program", "tool"), RUNS, ids=map("-".join, RUNS))
def test_clean(program, tool):
    """B08, B20: no access out of bounds, no race, no read of uninitialised memory, no misused barrier."""
    found = sanitizer()
    if found is None:
        pytest.skip("no compute-sanitizer on this machine")
    done = run(program, found, "--tool", tool)
    lines = [line.removeprefix("=========").removeprefix(" ") for line in done.stdout.splitlines()
             if line.startswith("=========")]  # fmt: skip
    if any("not supported" in line or "Unable to" in line for line in lines):
        pytest.skip(f"compute-sanitizer cannot work here: {' '.join(lines)[:300]}")
    if done.returncode == TAKE_TURNS:
        pytest.skip(f"under {tool} kernels that wait for each other do not run at the same time")
    reports = unexplained(tool, lines)
    assert reports == [], "\n".join(reports[:20])
    assert any("SUMMARY" in line for line in lines), done.stdout[-2000:]
    assert "relative error" in done.stdout and done.returncode == 0, done.stdout[-2000:]
