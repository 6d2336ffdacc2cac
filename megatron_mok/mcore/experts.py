"""Megatron-Core's experts with another forward: parameters, names, sharded state and DDP attributes stay
theirs.

Legend: S sequence, B batch, T = S*B tokens here, H hidden size, I expert intermediate size, K experts per
token, L experts on this rank.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

from .. import runtime
from ..config import current
from ..errors import ConfigError, Problem
from . import figures, report


class MokExperts:
    """Mixin: dispatch, both GEMMs, activation and combine in one operator.

    Needs of the class that it is mixed into: config, num_local_experts, ep_group, the linear layers.
    """

    layer_number: int | None = None  # for messages; set by the layer
    # The communicator of the last forward, for tracing only. Weak, so that a copied model does not copy it.
    comm: Callable[[], runtime.Comm | None] | None = None

    def expert_linears(self) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
        """Modules that own the weights of fc1 and fc2."""
        raise NotImplementedError

    def expert_weights(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """L weights [2I, H] (gate rows first) and L weights [H, I]."""
        raise NotImplementedError

    def forward(
        self, hidden_states: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [S, B, H], ids [T, K] int32 (-1: no route), probs [T, K] float32 -> [S, B, H], None.

        Collective over the expert-parallel group. Errors: those of megatron_mok.runtime, for example
        WorkspaceTooSmall here and PeerAbort on the peers where T exceeds the workspace.
        """
        settings = current()
        config: Any = self.config  # type: ignore[attr-defined]
        comm: runtime.Comm | None
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        aborting: contextlib.AbstractContextManager = contextlib.nullcontext()
        observe = None
        if not torch.compiler.is_compiling():
            comm = runtime.get_comm(
                self.ep_group,  # type: ignore[attr-defined]
                hidden=x.shape[1],
                top_k=ids.shape[1],
                num_experts=config.num_moe_experts,
                max_tokens=settings.max_tokens or max(x.shape[0], 1),  # the group's largest counts
                device=x.device,
                dtype=x.dtype,
                config=settings,
            )
            self.comm = weakref.ref(comm)
            if report.pending():  # no DDP of Megatron's has wrapped this model
                report.say(comm.backend, comm.why, speaker=0)
            aborting = comm.aborting()
            observe = figures.recorder()
        elif self.comm is None or (comm := self.comm()) is None:
            raise RuntimeError("the first forward of a MoE layer must run before torch.compile traces it")
        with aborting:  # from here on the peers are about to start the call
            run_forward_pre_hooks(self.expert_linears())
            w1, w2 = self.expert_weights()
        out = runtime.moe(
            x,
            ids,
            probs,
            w1,
            w2,
            comm=comm,
            num_experts=config.num_moe_experts,
            activation="swiglu",
            act_limit=None,
            save_capacity=settings.save_capacity,
            main_grad=settings.main_grad,
            layer=self.layer_number or 0,
            observe=observe,
        )
        return out.reshape(hidden_states.shape), None

    def backward_dw(self) -> None:
        """Nothing is left to do: backward has computed the weight gradients (delaying them is refused)."""


class MokSequentialMLP(MokExperts, SequentialMLP):
    """SequentialMLP: one MLP module an expert (local layers)."""

    def expert_linears(self) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
        return (
            [expert.linear_fc1 for expert in self.local_experts],
            [expert.linear_fc2 for expert in self.local_experts],
        )

    def expert_weights(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        fc1, fc2 = self.expert_linears()
        return [w.get_parameter("weight") for w in fc1], [w.get_parameter("weight") for w in fc2]


class MokTEGroupedMLP(MokExperts, TEGroupedMLP):
    """TEGroupedMLP: Transformer Engine's grouped linear layers own weight0 ... weight{L-1}."""

    def expert_linears(self) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
        return [self.linear_fc1], [self.linear_fc2]

    def expert_weights(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        count = range(self.num_local_experts)
        return (
            [self.linear_fc1.get_parameter(f"weight{i}") for i in count],
            [self.linear_fc2.get_parameter(f"weight{i}") for i in count],
        )


def with_mok(builder: Any) -> Callable[..., torch.nn.Module]:
    """The experts' builder of a layer spec (class, or partial of one), building our subclass instead.

    ConfigError for any other class: its weights may have another form.
    """
    target, args, keywords = builder, (), {}
    if isinstance(builder, functools.partial):
        target, args, keywords = builder.func, builder.args, builder.keywords
    for stock, ours in ((SequentialMLP, MokSequentialMLP), (TEGroupedMLP, MokTEGroupedMLP)):
        if target in (stock, ours):
            return functools.partial(ours, *args, **keywords)
    raise ConfigError(
        [
            Problem(
                "experts",
                getattr(target, "__qualname__", target),
                "SequentialMLP or TEGroupedMLP",
                "use Megatron-Core's local or Transformer Engine layer spec, or another dispatcher",
            )
        ],
        where="moe_token_dispatcher_type='mok'",
    )


def run_forward_pre_hooks(linears: tuple[list[torch.nn.Module], list[torch.nn.Module]]) -> None:
    """Run the forward pre-hooks of modules whose forward is bypassed.

    With overlapped parameter gathering Megatron's DDP finishes the all-gather of a module's weights in its
    pre-hook: without it stale weights would be read. RuntimeError if a hook wants to change an input.
    """
    for module in _modules(linears):
        for key, hook in module._forward_pre_hooks.items():
            with_kwargs = key in module._forward_pre_hooks_with_kwargs
            result = hook(module, (), {}) if with_kwargs else hook(module, ())
            if result is not None:
                raise RuntimeError(
                    f"a forward pre-hook of {type(module).__name__} changes its input, but the fused experts "
                    "never make that tensor: remove the hook or use another dispatcher"
                )


def _modules(linears: tuple[list[torch.nn.Module], list[torch.nn.Module]]) -> Iterator[torch.nn.Module]:
    for group in linears:
        for linear in group:
            yield from linear.modules()
