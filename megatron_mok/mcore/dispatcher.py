"""The token dispatcher's steps, for experts that dispatch and combine themselves.

Megatron-Core calls dispatch_preprocess, token_dispatch, dispatch_postprocess, the experts,
combine_preprocess, token_combine, combine_postprocess, and hands the values of one to the next untouched.
Here every step but two is the identity; what the experts need travels in those values, and nothing is kept on
the dispatcher, so that recomputation, virtual pipelines and several micro-batches in flight cannot mix up
their routes.

Legend: S sequence, B batch, T = S*B tokens here, H hidden size, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

NO_ROUTE = float("-inf")


def mark_routes(probs_TE: torch.Tensor, routing_map_TE: torch.Tensor) -> torch.Tensor:
    """Router probabilities with NO_ROUTE wherever the map has no route. [T, E], float32.

    The probability itself cannot tell: that of a chosen expert may underflow to 0.
    """
    return probs_TE.float().masked_fill(~routing_map_TE, NO_ROUTE)


def top_k(marked_TE: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [T, K] int32 and probabilities [T, K] float32 from `mark_routes`' output.

    Experts ascend along K, which fixes the order of the sum over k; a row with fewer than K routes holds id
    -1 and probability 0 in the slots left over. The gradient of the probabilities reaches every route.
    """
    with torch.no_grad():
        chosen_TK = marked_TE.topk(k, dim=-1, sorted=False).indices.sort(dim=-1).values
    probs_TK = marked_TE.gather(-1, chosen_TK)
    absent_TK = probs_TK.detach() == NO_ROUTE
    ids_TK = chosen_TK.masked_fill(absent_TK, -1).to(torch.int32)
    return ids_TK, probs_TK.masked_fill(absent_TK, 0.0)


class MokTokenDispatcher(MoETokenDispatcher):
    """Hands tokens [S, B, H], ids [T, K] and probabilities [T, K] to the experts, and their output on."""

    def __init__(
        self, num_local_experts: int, local_expert_indices: list[int], config: Any, pg_collection: Any
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.num_local_experts = num_local_experts
        self.local_expert_indices = local_expert_indices

    def dispatch_preprocess(
        self, tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [S, B, H], routing_map [T, E] bool, probs [T, E] -> tokens, marked probabilities [T, E]."""
        return tokens, mark_routes(probs, routing_map)

    def token_dispatch(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> tokens [S, B, H], ids [T, K] (where other dispatchers have counts), probabilities [T, K]."""
        ids, weights = top_k(probs, self.config.moe_router_topk)
        return hidden_states, ids, weights

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states
