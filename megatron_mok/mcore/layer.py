"""The MoE layer: Megatron-Core's own, with our dispatcher and experts where the configuration says "mok"."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from ..errors import ConfigError, Problem
from . import report
from .dispatcher import MokTokenDispatcher
from .experts import MokExperts, with_mok
from .refusals import NAME, validate


class MokMoELayer(MoELayer):
    """MoELayer for any dispatcher type: stock behaviour unless the type is "mok".

    Router, shared experts, latent projections, recomputation and forward are inherited.
    """

    def __init__(self, config: Any, submodules: Any = None, *args: Any, **kwargs: Any) -> None:
        if config.moe_token_dispatcher_type != NAME:
            super().__init__(config, submodules, *args, **kwargs)
            return
        validate(config)
        submodules = dataclasses.replace(submodules, experts=with_mok(submodules.experts))
        # The inherited constructor knows three types. "allgather" is the one that makes no CUDA stream.
        config.moe_token_dispatcher_type = "allgather"
        try:
            super().__init__(config, submodules, *args, **kwargs)
        finally:
            config.moe_token_dispatcher_type = NAME
        stock: Any = self.token_dispatcher  # type: ignore[has-type]
        groups = _Groups(stock.ep_group, stock.tp_group, stock.tp_ep_group)
        self.token_dispatcher = MokTokenDispatcher(
            self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups
        )
        for module in self.modules():  # experts and shared experts may hold a copy of the configuration
            inner = getattr(module, "config", None)
            if inner is not None and inner is not config and hasattr(inner, "moe_token_dispatcher_type"):
                inner.moe_token_dispatcher_type = NAME
        self.experts.layer_number = self.layer_number
        report.layer_was_built(self)

    def set_layer_number(self, layer_number: int) -> None:
        super().set_layer_number(layer_number)
        if isinstance(self.experts, MokExperts):
            self.experts.layer_number = layer_number


@dataclasses.dataclass(frozen=True)
class _Groups:
    """The part of a process group collection that a dispatcher reads."""

    ep: Any
    expt_tp: Any
    tp_ep: Any


def check_applied(model: torch.nn.Module) -> None:
    """ConfigError if a MoE layer of a built model is not ours although its configuration says "mok".

    Something else replaced the class, or the layer's spec was made before register().
    """
    layers = [m for m in model.modules() if isinstance(m, MoELayer)]
    wanted = [m for m in layers if m.config.moe_token_dispatcher_type == NAME]
    foreign = {type(m).__qualname__ for m in wanted if not isinstance(m.experts, MokExperts)}
    if foreign:
        need = "MokMoELayer in every MoE layer"
        remedy = "call megatron_mok.register() before layer specs are made; let nothing replace MoELayer"
        problem = Problem("MoE layer", ", ".join(sorted(foreign)), need, remedy)
        raise ConfigError([problem], where=f"moe_token_dispatcher_type={NAME!r}")
