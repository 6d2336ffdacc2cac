"""A small pool of gloo ranks that run named functions: started once, used by many tests.

Starting four processes that import torch and Megatron takes longer than most cases. `Ranks` starts them once;
each `run("module:function", ...)` calls that function with the same keyword arguments on every rank and
returns the list of results. Every call has a time limit; a call that exceeds it, or in which a rank fails
while others wait, ends all processes, and the next call starts fresh ones.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any, NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
START_LIMIT_S = 280.0  # imports on a busy machine
# A rank that has failed leaves its peers in a collective: they get this long to fail as well.
GRACE_S = 5.0


class Failure(NamedTuple):
    """What a rank raised."""

    rank: int
    type: str
    message: str
    traceback: str


class RanksFailed(Exception):
    """At least one rank raised, died or did not answer in time."""

    def __init__(self, failures: list[Failure], missing: list[int], logs: str) -> None:
        self.failures, self.missing = failures, missing
        text = "".join(f"\nrank {f.rank}:\n{f.traceback}" for f in failures)
        if missing:
            text += f"\nno answer from ranks {missing}\n{logs}"
        super().__init__(text)


class Ranks:
    """`world` processes; use as a context manager or call close()."""

    def __init__(self, world: int = 4, prepare: str = "", env: dict[str, str] | None = None) -> None:
        """`prepare`: module that a rank imports before it counts as started."""
        self.world, self.prepare = world, prepare
        self.env = env or {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pipes: list[Connection] = []
        self.folder = ""

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def start(self) -> None:
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        address = os.path.join(self.folder, "pipe")
        with Listener(address, "AF_UNIX") as listener:
            for rank in range(self.world):
                env = {
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE), os.environ.get("PYTHONPATH", "")]),
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": "1",
                    "TORCHDYNAMO_DISABLE": "1",
                    "PYTHONWARNINGS": "ignore",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(self.world),
                    "LOCAL_WORLD_SIZE": str(self.world),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    **self.env,
                }
                with open(self._log(rank), "wb") as log:
                    command = [sys.executable, str(HERE / "ranks.py"), address, self.prepare]
                    # A session of its own: what a rank starts (checkpoint writers) ends with it.
                    process = subprocess.Popen(
                        command, env=env, stdout=log, stderr=log, start_new_session=True
                    )
                    self.processes.append(process)
            pipes: dict[int, Connection] = {}
            deadline = time.monotonic() + START_LIMIT_S
            listener._listener._socket.settimeout(5.0)  # type: ignore[attr-defined]
            while len(pipes) < self.world:
                try:
                    pipe = listener.accept()
                    pipes[pipe.recv()] = pipe
                except TimeoutError:
                    missing = [r for r, p in enumerate(self.processes) if p.poll() is not None]
                    if not missing and time.monotonic() > deadline:
                        missing = sorted({*range(self.world)} - {*pipes})
                    if missing:
                        raise RanksFailed([], missing, self._logs()) from None
        self.pipes = [pipes[rank] for rank in range(self.world)]

    def run(self, target: str, /, limit_s: float = 120.0, **kwargs: Any) -> list[Any]:
        """Results of `target` ("module:function") on every rank; RanksFailed if one fails or time runs
        out."""
        if not self.pipes:
            self.start()
        try:
            return self._run(target, limit_s, kwargs)
        except BaseException:
            self.close()
            raise

    def _run(self, target: str, limit_s: float, kwargs: dict[str, Any]) -> list[Any]:
        for pipe in self.pipes:
            _send(pipe, (target, kwargs))
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        deadline = time.monotonic() + limit_s
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    ok, value = _receive(pipe)
                except (EOFError, ConnectionError):
                    ok, value = False, ("ProcessDied", "the process ended", self._logs())
                if ok:
                    results[rank] = value
                else:
                    failures.append(Failure(rank, *value))
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures or waiting:
            raise RanksFailed(failures, sorted(waiting.values()), self._logs())
        return [results[rank] for rank in range(self.world)]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.pipes, self.processes = [], []
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = ""

    def _log(self, rank: int) -> str:
        return os.path.join(self.folder, f"rank{rank}.log")

    def _logs(self, last: int = 3000) -> str:
        parts = []
        for rank in range(self.world):
            with open(self._log(rank), "rb") as log:
                parts.append(f"--- log of rank {rank}\n{log.read()[-last:].decode(errors='replace')}")
        return "\n".join(parts)


def serve(address: str, prepare: str) -> None:
    """The other end: connect, then run what is asked for until the pipe closes."""
    if prepare:
        importlib.import_module(prepare)
    pipe = Client(address, "AF_UNIX")
    pipe.send(int(os.environ["RANK"]))
    while True:
        try:
            target, kwargs = _receive(pipe)
        except EOFError:
            return
        module, function = target.split(":")
        try:
            answer = (True, getattr(importlib.import_module(module), function)(**kwargs))
        except BaseException as error:
            answer = (False, (type(error).__name__, str(error), traceback.format_exc()))
        _send(pipe, answer)


def _send(pipe: Connection, value: Any) -> None:
    """Plain pickle: Connection.send would hand tensors over in shared memory, which ends with the process."""
    pipe.send_bytes(pickle.dumps(value))


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
