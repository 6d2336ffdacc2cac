"""The dispatchers that `mok ab` compares with: the flags that select each, and what each needs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

PROBE_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Baseline:
    """A dispatcher of Megatron-Core: `flags` select it, `probe` is Python that works where it is there."""

    name: str
    flags: tuple[str, ...]
    probe: str = ""
    needs: str = ""

    def missing(self) -> str | None:
        """What is not there, in a line; None where the baseline can run. Imports nothing here."""
        if not self.probe:
            return None
        statement = f"{self.probe}\nimport torch\nassert torch.cuda.is_available(), 'no GPU'"
        command = [sys.executable, "-c", statement]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return f"{self.name}: needs {self.needs}; its import took more than {PROBE_TIMEOUT_S:.0f} s"
        if done.returncode == 0:
            return None
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"{self.name}: needs {self.needs}; found: {reason}"


def _flex(backend: str) -> tuple[str, ...]:
    flags = ("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", backend)
    return (*flags, "--moe-router-dtype", "fp32")


BASELINES = {
    baseline.name: baseline
    for baseline in (
        Baseline("alltoall", ("--moe-token-dispatcher-type", "alltoall")),
        Baseline("allgather", ("--moe-token-dispatcher-type", "allgather")),
        Baseline(
            "deepep",
            _flex("deepep"),
            "from deep_ep import Buffer",
            "NVIDIA GPUs and DeepEP (github.com/deepseek-ai/DeepEP)",
        ),
        Baseline(
            "hybridep",
            _flex("hybridep"),
            "from deep_ep import HybridEPBuffer",
            "NVIDIA GPUs and DeepEP's hybrid-ep branch (github.com/deepseek-ai/DeepEP)",
        ),
        Baseline(
            "ncclep",
            _flex("ncclep"),
            "import torch, transformer_engine.pytorch.ep",
            "NVIDIA GPUs and Transformer Engine built with NCCL EP",
        ),
    )
}
MOK_FLAGS = ("--moe-token-dispatcher-type", "mok")
