"""Virtual ranks: a group in one process on one GPU, each rank with its stream and its share of the SMs.

The kernels and the protocol are those of several GPUs: ranks wait for each other's flags while all of them
run. For tests and for studying the protocol on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import native

Inputs = Sequence[tuple[Tensor, Tensor, Tensor, Sequence[Tensor], Sequence[Tensor]]]


class VirtualRanks:
    """R ranks for layers of one (hidden size, top-k, max_tokens) on one GPU.

    settings.num_sms is one rank's share: at most SMs / R, so that all kernels that wait for each other run at
    the same time; 0 takes that.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        hidden: int,
        top_k: int,
        max_tokens: int,
        device: torch.device,
        settings: native.Settings | None = None,
    ) -> None:
        settings = settings or native.Settings()
        share = torch.cuda.get_device_properties(device).multi_processor_count // num_ranks // 2 * 2
        if not 0 <= settings.num_sms <= share:
            raise ValueError(f"num_sms: got {settings.num_sms}, need at most {share} for {num_ranks} ranks")
        self.settings = replace(settings, num_sms=settings.num_sms or share)
        self.device = device
        size = native.symmetric_bytes(num_ranks=num_ranks, top_k=top_k, hidden=hidden, max_tokens=max_tokens)
        self.regions = [native.aligned_empty(size, device) for _ in range(num_ranks)]
        self.ranks = [
            native.Communicator(
                rank=rank,
                regions=[region.data_ptr() for region in self.regions],
                hidden=hidden,
                top_k=top_k,
                max_tokens=max_tokens,
                device=device,
                settings=self.settings,
            )
            for rank in range(num_ranks)
        ]
        # Kernels of the default stream may be ordered behind those of other streams: none runs there.
        self.streams = [torch.cuda.Stream(device) for _ in range(num_ranks)]
        for rank in self.ranks:
            rank.init()

    def prepare(
        self,
        inputs: Inputs,
        *,
        num_experts: int,
        save_rows: Sequence[int] | None = None,
        activation: int = 0,
        act_limit: float = 0.0,
        layers: Sequence[int] | None = None,
    ) -> list[native.Call]:
        """The call of every rank, all memory allocated: an allocation could wait for kernels that wait.

        inputs     per rank (x [T, H] bf16, ids [T, K] int32, probs [T, K] fp32, w1, w2 of its experts)
        save_rows  per rank, rows of h to save; None: none
        layers     per rank, its number of the layer; None: 0
        """
        caller = torch.cuda.current_stream(self.device)
        calls = []
        for r, (rank, stream) in enumerate(zip(self.ranks, self.streams, strict=True)):
            rank.check()
            rank.layer = layers[r] if layers else 0
            stream.wait_stream(caller)
            with torch.cuda.stream(stream):
                rows = save_rows[r] if save_rows else 0
                calls.append(rank.prepare(*inputs[r], num_experts, rows, activation, act_limit))
        return calls

    def launch(
        self,
        calls: Sequence[native.Call],
        *,
        schedule: Sequence[int] | None = None,
        main: Sequence[int] | None = None,
        before: Callable[[int], None] | None = None,
        between: Callable[[int], None] | None = None,
    ) -> None:
        """Launch both kernels of every rank; the current stream then waits for all of them.

        schedule, main   the ranks that launch that kernel; None: all. A rank without a main kernel leaves its
                         workspace in the middle of a call
        before, between  called with the rank on its stream before and between its kernels, to delay it
        """
        every = range(len(calls))
        for kernel, ranks, hook in (
            (native.Call.schedule_rows, schedule, before),
            (native.Call.forward, main, between),
        ):
            for r in every if ranks is None else ranks:
                with torch.cuda.stream(self.streams[r]):
                    if hook:
                        hook(r)
                    kernel(calls[r])
        self._join()

    def prepare_backward(
        self,
        inputs: Inputs,
        calls: Sequence[native.Call],
        dy: Sequence[Tensor],
        gradients: Sequence[tuple[Sequence[Tensor], Sequence[Tensor]]],
        *,
        num_experts: int,
        accumulate: bool = False,
        needs: int = 3,
        activation: int = 0,
        act_limit: float = 0.0,
        layers: Sequence[int] | None = None,
    ) -> list[native.BackwardCall]:
        """The backward of every rank's forward call, all memory allocated.

        inputs, calls  what prepare() took and returned
        dy             per rank [T, H] bf16
        gradients      per rank (dw1, dw2), as the operator takes them
        """
        caller = torch.cuda.current_stream(self.device)
        prepared = []
        for r, (rank, stream) in enumerate(zip(self.ranks, self.streams, strict=True)):
            rank.check()
            rank.layer = layers[r] if layers else 0
            stream.wait_stream(caller)
            x, ids, _, w1, w2 = inputs[r]
            with torch.cuda.stream(stream):
                call = rank.prepare_backward(
                    dy[r], x, ids, w1, w2, calls[r].h, calls[r].schedule, *gradients[r], num_experts,
                    accumulate, needs, activation, act_limit,
                )  # fmt: skip
            prepared.append(call)
        return prepared

    def launch_backward(
        self,
        calls: Sequence[native.BackwardCall],
        *,
        ranks: Sequence[int] | None = None,
        before: Callable[[int], None] | None = None,
    ) -> None:
        """Launch the kernel of `ranks` (None: all); the current stream then waits for all of them.

        before: called with the rank on its stream before its kernel, to delay it
        """
        chosen = range(len(calls)) if ranks is None else ranks
        for r in chosen:
            with torch.cuda.stream(self.streams[r]):
                if before:
                    before(r)
                calls[r].backward()
        for r in chosen:
            with torch.cuda.stream(self.streams[r]):
                calls[r].finish()
        self._join()

    def _join(self) -> None:
        for stream in self.streams:
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def forward(self, inputs: Inputs, **options: Any) -> list[native.Call]:
        """prepare() and launch(): one forward call on every rank."""
        calls = self.prepare(inputs, **options)
        self.launch(calls)
        return calls

    def check(self) -> None:
        """Raise the first error that ended a rank, if any did. The caller has synchronised."""
        for rank in self.ranks:
            rank.check()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.regions.clear()
