"""However a job ends, its processes end: no collective call waits for one that has gone (the GPU's half is in
tests/gpu/test_processes.py)."""

import re
import time
from pathlib import Path

import pytest

from tests.dist import harness


@pytest.mark.parametrize("way", ["return", "destroy", "collect on one rank", "exception on one rank"])
def test_B52_both_ranks_end(way, tmp_path):
    start = time.monotonic()
    results = harness.run(Path(__file__).with_name("ends.py"), 2, tmp_path, 60, way)
    seconds = time.monotonic() - start
    errors, logs = ([r["exit"]["error"] for r in results], [p.read_text() for p in tmp_path.glob("*.log")])
    if way == "return":  # torch, left with its groups, now and then aborts as the interpreter ends
        errors = ["" if "terminate called without an active exception" in e else e for e in errors]
    if way != "exception on one rank":
        assert errors == ["", ""] and all("ended" in log for log in logs)
        if way != "return":  # nothing of ours keeps the threads of a group that has been destroyed
            assert all(re.search("threads at the end: (?!.*gloo)", log) for log in logs), logs
    else:
        assert "OSError: no data left" in errors[1] and "exit code 1" in errors[0]
        assert "PeerAbort" in errors[0] or "PeerTimeout" in errors[0]
    assert seconds < 60


def test_B49_a_rank_that_is_killed_is_named(tmp_path):
    """Between two calls and inside one: the other ranks end at once, with an error, and go on without it."""
    results = harness.run(Path(__file__).with_name("ends.py"), 3, tmp_path, 60, "killed")
    assert all(r["exit"]["error"].startswith("exit code -9") for r in results[1:]), results
    said = (tmp_path / "rank0.log").read_text().splitlines()
    first, second = (line for line in said if " s, " in line)
    # gloo may know that the rank has gone before this one waits for it by name
    assert "PeerAbort" in first and re.search("lost rank 2 in publication", first)
    assert "PeerAbort" in second and "lost a peer in" in second and "ended" in said
    assert max(float(line.split(" s, ")[0]) for line in (first, second)) < 20
