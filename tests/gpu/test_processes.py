"""Ranks in processes of their own: rendezvous, symmetric memory, errors, teardown.

They have a GPU each where there are enough. On one GPU kernels of different processes take turns of about
2 ms, so that is slow and tests function only.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
RANKS = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each rank saw, by scenario; the processes are started once."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = dict(
        os.environ,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(RANKS),
        PYTHONPATH=str(ROOT),
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.process_ranks", folder],
            cwd=ROOT,
            env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        output = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    files = [folder / f"{rank}.json" for rank in range(RANKS)]
    for rank, file in enumerate(files):
        assert file.exists(), f"rank {rank} ended with {processes[rank].returncode}:\n{output[rank][-3000:]}"
    return [json.loads(file.read_text()) for file in files]


def of(results, scenario, ranks=range(RANKS)):
    return [results[r].get(scenario, "not reached") for r in ranks]


@pytest.mark.parametrize("scenario", ["four", "four-one rank gets all", "two"])
def test_correct(results, scenario):
    for rank, found in enumerate(of(results, scenario)):
        assert isinstance(found, list), f"rank {rank}: {found}"
        ours, theirs, same_bits = found
        assert ours <= 2 * theirs + 1e-6, f"rank {rank}: relative error {ours:.3g}, torch's {theirs:.3g}"
        assert same_bits


@pytest.mark.parametrize("scenario", ["backward of four", "backward of two"])
def test_gradients_are_correct(results, scenario):
    for rank, found in enumerate(of(results, scenario)):
        assert isinstance(found, list), f"rank {rank}: {found}"
        errors, same_bits = found
        for name, (ours, theirs) in errors.items():
            text = f"rank {rank}, {name}: relative error {ours:.3g}, torch's {theirs:.3g}"
            assert ours <= 2 * theirs + 1e-6, text
        assert same_bits


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="the ranks do not all share one GPU here")
def test_B66_a_shared_gpu_is_refused_on_all_ranks(results):
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    for found in of(results, "refused"):
        assert found.startswith("ValueError") and f"ranks [0, 1, 2, 3] on GPU {uuid}" in found


def test_B06_too_many_tokens_end_the_call_everywhere(results):
    found = of(results, "too many")
    assert found[1].startswith("WorkspaceTooSmall") and "got 200, need at most 64" in found[1]
    for rank in (0, 2, 3):
        assert found[rank].startswith("PeerAbort") and "rank 1 gave up" in found[rank]


def test_B49_a_rank_that_stays_away_is_named(results):
    """B50, B51: every waiting rank gets one error, in bounded time."""
    found = of(results, "absent")
    assert found[3] == "nothing"
    assert all(text.startswith(("PeerTimeout", "PeerAbort")) for text in found[:3]), found
    late = [text for text in found[:3] if text.startswith("PeerTimeout")]
    assert late and all("no answer from rank 3" in text and "layer 2" in text for text in late)


def test_B52_all_ranks_end(results):
    assert of(results, "ended") == [RANKS] * RANKS
