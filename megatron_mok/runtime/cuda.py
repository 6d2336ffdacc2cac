"""The CUDA back end: one rank alone, or one process a GPU over torch's symmetric memory.

Only memory that every peer maps, and pointers into it, are needed; NVLink multicast is switched off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import env, native
from ..config import kernel_problems
from ..errors import ConfigError, MokError, Problem, UnsupportedDevice
from ..reference import exchange
from .agreement import on_all
from .provider import Request


class CudaProvider:
    name = "cuda"

    def why(self, device: torch.device) -> str:
        info = native.build_info()
        try:
            native.load_kernels(device)
        except MokError:
            raise
        except RuntimeError as error:  # a driver that is older than the toolkit, for example
            raise UnsupportedDevice(
                f"backend cuda: {error}; the library was built with CUDA {info['cuda']}, torch has "
                f"{torch.version.cuda}: use a driver for the newer of the two, or build for the older"
            ) from error
        archs = ", ".join(info["archs"])
        return f"kernels for {archs}, CUDA {info['cuda']}, on {torch.cuda.get_device_name(device)}"

    def facts(self, device: torch.device) -> dict[str, object]:
        properties = torch.cuda.get_device_properties(device)
        info = native.build_info()
        return {
            "gpu": f"{properties.major}.{properties.minor}",
            "num_sms": properties.multi_processor_count,
            "library": f"ABI {info['abi']}, csrc {info['csrc_tree']}",
        }

    def open(self, request: Request) -> int:
        ranks = exchange.lookup(request.control)
        on_all(ranks, lambda: _check(request, ranks.size))
        bytes_here = native.symmetric_bytes(
            num_ranks=ranks.size, top_k=request.top_k, hidden=request.hidden, max_tokens=request.max_tokens
        )
        if ranks.size == 1:
            region = native.aligned_empty(bytes_here, request.device)
            regions: Sequence[int] = [region.data_ptr()]
            keep: Any = region
        else:
            _check_devices(ranks, request.device, request.config.shared_device)
            regions, keep = _rendezvous(request, ranks, bytes_here)
        communicator = native.Communicator(
            rank=ranks.rank,
            regions=regions,
            hidden=request.hidden,
            top_k=request.top_k,
            max_tokens=request.max_tokens,
            device=request.device,
            settings=_settings(request, ranks),
            keep=keep,
        )
        communicator.init()  # the caller's next message to all ranks is the barrier that must follow
        return native.register(communicator)

    def abort(self, handle: int, cause: Exception) -> None:
        native.lookup(handle).abort(cause)

    def set_layer(self, handle: int, layer: int) -> None:
        native.lookup(handle).layer = layer

    def waited_ns(self, handle: int) -> torch.Tensor:
        return native.lookup(handle).waited_ns()

    def close(self, handle: int) -> None:
        native.close(handle)


def _check(request: Request, num_ranks: int) -> None:
    """ConfigError listing what the kernels cannot do; RuntimeError inside a CUDA graph capture."""
    problems = kernel_problems(
        hidden=request.hidden,
        top_k=request.top_k,
        ranks=num_ranks,
        local_experts=request.num_experts // num_ranks,
    )
    if request.dtype != torch.bfloat16:
        problems.append(
            Problem("dtype", request.dtype, "torch.bfloat16 on the GPU", "use --bf16 or backend='reference'")
        )
    sms = torch.cuda.get_device_properties(request.device).multi_processor_count
    config = request.config
    if config.num_sms and not 4 <= config.num_sms <= sms:
        problems.append(Problem("num_sms", config.num_sms, f"4 to {sms}, this GPU's", "leave it out"))
    if config.comm_sms and max(config.comm_sms) > (config.num_sms or sms // 2 * 2):
        problems.append(
            Problem("comm_sms", config.comm_sms, f"at most num_sms ({config.num_sms or sms})", "lower it")
        )
    if problems:
        raise ConfigError(problems, where="backend cuda")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "the workspace cannot be made inside a CUDA graph capture: run one forward on every rank before"
        )


def _settings(request: Request, ranks: exchange.Exchange) -> native.Settings:
    config = request.config
    sms = torch.cuda.get_device_properties(request.device).multi_processor_count
    return native.Settings(
        num_sms=config.num_sms or sms // 2 * 2,
        comm_sms=config.comm_sms[0] if config.comm_sms else 0,
        backward_comm_sms=config.comm_sms[1] if config.comm_sms else 0,
        minibatch_units=-(-(config.minibatch_rows or 0) // native.UNIT_ROWS),
        ring_rows=config.ring_rows or 0,
        timeout_s=ranks.timeout_s,
        first_timeout_s=ranks.first_timeout_s if ranks.size > 1 else ranks.timeout_s,
    )


def _check_devices(ranks: exchange.Exchange, device: torch.device, shared: bool) -> None:
    """ValueError, the same on all ranks, for ranks that share a GPU or GPUs that cannot reach each other."""
    visible = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    here = visible[device.index]
    everyone = on_all(ranks, lambda: here)
    together = {uuid: [r for r, other in enumerate(everyone) if other == uuid] for uuid in everyone}
    crowded = {uuid: same for uuid, same in together.items() if len(same) > 1}
    if crowded and not shared:
        listed = "; ".join(f"ranks {same} on GPU {uuid}" for uuid, same in crowded.items())
        raise ValueError(
            f"{listed}: need one GPU for each rank; check LOCAL_RANK, torch.cuda.set_device and "
            "CUDA_VISIBLE_DEVICES, or pass shared_device=True (--mok-shared-device; works, but slowly)"
        )
    apart = [
        rank
        for rank, uuid in enumerate(everyone)
        if uuid != here
        and uuid in visible
        and not torch.cuda.can_device_access_peer(device.index, visible.index(uuid))
    ]
    pairs = [(rank, peer) for rank, peers in enumerate(on_all(ranks, lambda: apart)) for peer in peers]
    if pairs:
        raise ValueError(
            f"GPUs of ranks {pairs} cannot access each other's memory: need peer access between all GPUs of "
            "an expert-parallel group; use --moe-token-dispatcher-type alltoall here"
        )


def _rendezvous(request: Request, ranks: exchange.Exchange, size_bytes: int) -> tuple[Sequence[int], Any]:
    """Addresses of all ranks' regions, and what keeps them mapped. Collective."""
    rank = ranks.rank
    env.put("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if request.config.shared_device:
        env.put("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    from torch.distributed import _symmetric_memory as symmetric_memory

    made: list[torch.Tensor] = []

    def allocate() -> None:
        # Not symmetric_memory.empty(): newer versions carve tensors out of a pool that may differ by rank.
        make = symmetric_memory._SymmetricMemory.empty_strided_p2p
        made.append(make((size_bytes,), (1,), torch.uint8, request.device))

    on_all(ranks, allocate)  # before torch's rendezvous, in which a rank would wait for one without memory
    region = made[0]
    try:
        handle = symmetric_memory.rendezvous(region, request.group)
    except RuntimeError as error:
        raise RuntimeError(
            f"symmetric memory of rank {rank}: {error}. One host: containers need pidfd_getfd (a seccomp "
            "profile that allows it, or --cap-add SYS_PTRACE) and no expandable_segments; several hosts: "
            "a running fabric manager and IMEX channels. `mok doctor` checks these"
        ) from error
    if handle.multicast_ptr != 0 or handle.buffer_ptrs[rank] != region.data_ptr():
        raise RuntimeError(
            f"symmetric memory of rank {rank}: got multicast pointer {handle.multicast_ptr:#x} and buffer "
            f"{handle.buffer_ptrs[rank]:#x}, need 0 and {region.data_ptr():#x}; set "
            "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before any symmetric allocation"
        )
    return handle.buffer_ptrs, (handle, region)


PROVIDER = CudaProvider()
