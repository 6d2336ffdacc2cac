"""Ranks in processes of their own: rendezvous, symmetric memory, errors, teardown, ranks that are killed.

They have a GPU each where there are several: 2, 4 and 8 ranks, as GPUs allow. On one GPU they share it;
kernels of different processes then take turns of about 2 ms, so that is slow and tests function only.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SEVERAL = [ranks for ranks in (2, 4, 8) if ranks <= torch.cuda.device_count()]
# Longest wait for a rank that was killed. The driver has to take its kernels away within 0.7 of that.
LIMIT_S = 5.0


def start(ranks, folder, *arguments):
    """Run the processes: (output, exit code) of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    base = dict(os.environ, PYTHONPATH=str(ROOT), **job)
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.process_ranks", folder, *arguments],
            cwd=ROOT,
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        return [(process.communicate(timeout=150)[0], process.returncode) for process in processes]
    finally:
        for process in processes:
            process.kill()


class Results(list):
    """What each rank saw, by scenario."""

    def of(self, scenario):
        return [seen.get(scenario, "not reached") for seen in self]


@pytest.fixture(scope="module", params=SEVERAL or [4])
def results(request, tmp_path_factory):
    """The processes are started once for each number of ranks."""
    folder = tmp_path_factory.mktemp("processes")
    ended = start(request.param, folder)
    files = [folder / f"{rank}.json" for rank in range(request.param)]
    for rank, (file, (output, code)) in enumerate(zip(files, ended, strict=True)):
        assert file.exists(), f"rank {rank} ended with {code}:\n{output[-3000:]}"
    return Results(json.loads(file.read_text()) for file in files)


def skip_halves_of_one_rank(results, scenario):
    if "half" in scenario and len(results) == 2:
        pytest.skip("half of two ranks is one rank, which has no peers")


@pytest.mark.parametrize("scenario", ["all", "all-one rank gets all", "half"])
def test_correct(results, scenario):
    skip_halves_of_one_rank(results, scenario)
    for rank, found in enumerate(results.of(scenario)):
        assert isinstance(found, list), f"rank {rank}: {found}"
        ours, theirs, same_bits = found
        assert ours <= 2 * theirs + 1e-6, f"rank {rank}: relative error {ours:.3g}, torch's {theirs:.3g}"
        assert same_bits


@pytest.mark.parametrize("scenario", ["backward of all", "backward of half"])
def test_gradients_are_correct(results, scenario):
    skip_halves_of_one_rank(results, scenario)
    for rank, found in enumerate(results.of(scenario)):
        assert isinstance(found, list), f"rank {rank}: {found}"
        errors, same_bits = found
        for name, (ours, theirs) in errors.items():
            text = f"rank {rank}, {name}: relative error {ours:.3g}, torch's {theirs:.3g}"
            assert ours <= 2 * theirs + 1e-6, text
        assert same_bits


def test_B66_a_shared_gpu_is_refused_on_all_ranks(results):
    """Where there are more GPUs, too: all ranks ask for the first."""
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    for found in results.of("refused"):
        assert found.startswith("ValueError") and f"ranks {list(range(len(results)))} on GPU {uuid}" in found


@pytest.mark.parametrize("scenario", ["grown", "grown of half"])
def test_B06_a_workspace_that_has_grown_changes_no_bit(results, scenario):
    """Between steps, by reserve() or by release(), for more tokens of rank 1 alone."""
    skip_halves_of_one_rank(results, scenario)
    want = {"from the start": [200, 200, True], "reserve": [64, 200, True], "release": [64, 200, True]}
    assert results.of(scenario) == [want] * len(results)


def test_B06_too_many_tokens_end_the_call_everywhere(results):
    found = results.of("too many")
    assert found[1].startswith("WorkspaceTooSmall") and "got 200, need at most 64" in found[1]
    for text in found[:1] + found[2:]:
        assert text.startswith("PeerAbort") and "rank 1 gave up" in text


def test_B49_a_rank_that_stays_away_is_named(results):
    """B50, B51: every waiting rank gets one error, in bounded time."""
    found = results.of("absent")
    last = len(results) - 1
    assert found[last] == "nothing"
    assert all(text.startswith(("PeerTimeout", "PeerAbort")) for text in found[:last]), found
    late = [text for text in found[:last] if text.startswith("PeerTimeout")]
    assert late and all(f"no answer from rank {last}" in text and "layer 2" in text for text in late)


def test_B52_all_ranks_end(results):
    assert results.of("ended") == [len(results)] * len(results)


@pytest.mark.parametrize("ranks", SEVERAL or [2, 4])
def test_B49_ranks_that_are_killed_are_named(ranks, tmp_path):
    """Between two calls, inside a forward, inside a backward: each time the last rank of those that are left.
    The others end in bounded time, at least one with an error that names it, and go on without it.
    """
    ended = start(ranks, tmp_path, str(LIMIT_S))
    ways = ["between calls", "inside a forward", "inside a backward"] if ranks > 2 else ["inside a forward"]
    left = ranks - len(ways)
    codes = [code for _, code in ended[left:]]
    assert codes == [-signal.SIGKILL] * len(ways), "\n".join(text[-1500:] for text, _ in ended)
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(left)]
    for i, way in enumerate(ways):
        victim = ranks - 1 - i
        files = [tmp_path / f"{rank}.json" for rank in range(victim)]
        found = [json.loads(file.read_text())[way] for file in files]
        assert all(isinstance(each, list) for each in found), f"{way}: {found}"
        assert all(text.startswith(("PeerTimeout", "PeerAbort")) for text, _ in found), f"{way}: {found}"
        late = [text for text, _ in found if text.startswith("PeerTimeout")]
        assert late and all(f"no answer from rank {victim}" in text for text in late), f"{way}: {found}"
        assert all("layer 5" in text for text in late), f"{way}: {found}"
        assert max(seconds for _, seconds in found) < 2 * LIMIT_S + 2, f"{way}: {found}"
    assert [each.get("ended") for each in seen] == [ranks] * left, [text[-1500:] for text, _ in ended[:left]]
