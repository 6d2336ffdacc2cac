"""Energy, NVLink bytes, memory and busy time of this host's GPUs, read through NVML by ctypes.

Every figure is None where the machine cannot tell it: no NVML, no such counter, too few samples.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field
from typing import Any

from megatron_mok import env

NVLINK_DATA_TX, ALL_LINKS = 138, 0xFFFFFFFF  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, in KiB, over all links


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class _Utilization(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _FieldValue(ctypes.Structure):
    _fields_ = [
        ("field_id", ctypes.c_uint),
        ("scope_id", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency_us", ctypes.c_longlong),
        ("value_type", ctypes.c_int),
        ("status", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    ]


class Nvml:
    """Counters of `count` GPUs, those that CUDA_VISIBLE_DEVICES names first. Raises OSError without NVML."""

    def __init__(self, count: int, library: Any = None):
        self.nvml = library or ctypes.CDLL("libnvidia-ml.so.1")
        if self.nvml.nvmlInit_v2() != 0:
            raise OSError("nvmlInit failed")
        visible = env.text("CUDA_VISIBLE_DEVICES")
        names = [name.strip() for name in visible.split(",")] if visible else [str(i) for i in range(count)]
        self.handles = [self._handle(name) for name in names[:count]]

    def _handle(self, name: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        if name.isdigit():
            status = self.nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
        else:
            status = self.nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        if status != 0:
            raise OSError(f"NVML knows no GPU {name}")
        return handle

    def _each(self, function: str, make, value) -> list | None:
        """`value(out)` of every GPU, or None where one cannot tell."""
        values = []
        for handle in self.handles:
            out = make()
            if getattr(self.nvml, function)(handle, ctypes.byref(out)) != 0:
                return None
            values.append(value(out))
        return values

    def energy_j(self) -> float | None:
        """Joules since the driver was loaded, all GPUs together."""
        mj = self._each("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong, lambda out: out.value)
        return None if mj is None else sum(mj) / 1e3

    def nvlink_bytes(self) -> int | None:
        """Payload bytes that all GPUs together have sent over NVLink."""
        total = 0
        for handle in self.handles:
            request = _FieldValue(field_id=NVLINK_DATA_TX, scope_id=ALL_LINKS)
            status = self.nvml.nvmlDeviceGetFieldValues(handle, 1, ctypes.byref(request))
            if status != 0 or request.status != 0:
                return None
            total += request.value * 1024
        return total

    def used_bytes(self) -> int | None:
        """Memory in use on the fullest GPU."""
        used = self._each("nvmlDeviceGetMemoryInfo", _Memory, lambda out: out.used)
        return None if used is None else max(used)

    def busy(self) -> float | None:
        """Share of the last sampling period in which a kernel ran, mean of the GPUs."""
        busy = self._each("nvmlDeviceGetUtilizationRates", _Utilization, lambda out: out.gpu / 100)
        return None if busy is None else sum(busy) / len(busy)

    def driver(self) -> str | None:
        """Version of the driver."""
        text = ctypes.create_string_buffer(80)  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
        status = self.nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
        return text.value.decode() if status == 0 else None


def open_nvml(gpus: int) -> Nvml | None:
    """NVML for `gpus` GPUs, None on a machine without it."""
    try:
        return Nvml(gpus) if gpus else None
    except (OSError, AttributeError):
        return None


@dataclass
class Telemetry:
    """Samples of one run of `steps` steps: call `sample` often with the number of steps done so far.

    From step `warmup` to the last one counters are differenced and busy shares averaged: neither start-up nor
    the end of the process counts. A busy share tells of up to `period_s` before it was asked for.
    """

    nvml: Nvml | None
    warmup: int
    steps: int
    period_s: float = 1.0
    start: tuple[int, float | None, int | None] | None = None
    last: tuple[int, float | None, int | None] | None = None
    peak: int | None = None
    busy: list[float] = field(default_factory=list)
    settled: float = 0.0  # when a busy share no longer tells of steps before `warmup`

    def sample(self, step: int) -> None:
        if self.nvml is None:
            return
        used = self.nvml.used_bytes()
        if used is not None:
            self.peak = max(self.peak or 0, used)
        if step < self.warmup:
            return
        if self.last is None or step > self.last[0]:
            self.last = (step, self.nvml.energy_j(), self.nvml.nvlink_bytes())
        if self.start is None:
            self.start, self.settled = self.last, time.monotonic() + self.period_s
        if step < self.steps and time.monotonic() >= self.settled:
            busy = self.nvml.busy()
            if busy is not None:
                self.busy.append(busy)

    def figures(self) -> dict[str, Any]:
        """peak_memory_bytes, energy_j_per_step, nvlink_bytes_per_step, idle_fraction; None where unknown."""
        energy = nvlink = None
        if self.start and self.last and self.last[0] > self.start[0]:
            steps = self.last[0] - self.start[0]
            if self.start[1] is not None and self.last[1] is not None:
                energy = (self.last[1] - self.start[1]) / steps
            if self.start[2] is not None and self.last[2] is not None:
                nvlink = round((self.last[2] - self.start[2]) / steps)
        return {
            "peak_memory_bytes": self.peak,
            "nvlink_bytes_per_step": nvlink,
            "energy_j_per_step": energy,
            "idle_fraction": 1 - sum(self.busy) / len(self.busy) if self.busy else None,
        }
