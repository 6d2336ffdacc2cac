"""Virtual ranks: a group in one process on one GPU, each rank with its stream and its share of the SMs.

The kernels and the protocol are those of several GPUs: ranks wait for each other's flags while all of them
run. For tests and for studying the protocol on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

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

    def forward(
        self,
        inputs: Inputs,
        *,
        num_experts: int,
        save_rows: Sequence[int] | None = None,
        activation: int = 0,
        act_limit: float = 0.0,
        layers: Sequence[int] | None = None,
        before: Callable[[int], None] | None = None,
        only: Sequence[int] | None = None,
        main: bool = True,
    ) -> list[native.Call]:
        """One forward call on every rank; the current stream waits for all of them.

        inputs     per rank (x [T, H] bf16, ids [T, K] int32, probs [T, K] fp32, w1, w2 of its experts)
        save_rows  per rank, rows of h to save; None: none
        layers     per rank, its number of the layer; None: 0
        before     called on a rank's stream before its kernels are launched, to delay it
        only       the ranks that take part; the others never come
        main       False: the schedule alone
        """
        caller = torch.cuda.current_stream(self.device)
        taking_part = range(len(self.ranks)) if only is None else only
        calls = []
        for r in taking_part:  # everything is allocated before the first kernel can wait
            self.ranks[r].check()
            self.ranks[r].layer = layers[r] if layers else 0
            self.streams[r].wait_stream(caller)
            with torch.cuda.stream(self.streams[r]):
                rows = save_rows[r] if save_rows else 0
                calls.append(self.ranks[r].prepare(*inputs[r], num_experts, rows, activation, act_limit))
        for r, call in zip(taking_part, calls, strict=True):
            with torch.cuda.stream(self.streams[r]):
                if before:
                    before(r)
                call.schedule_rows()
        if main:
            for call in calls:
                call.forward()
        for r in taking_part:
            caller.wait_stream(self.streams[r])
        return calls

    def check(self) -> None:
        """Raise the first error that ended a rank, if any did. The caller has synchronised."""
        for rank in self.ranks:
            rank.check()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.regions.clear()
