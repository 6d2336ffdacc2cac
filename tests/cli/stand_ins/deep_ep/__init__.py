"""A stand-in for DeepEP over gloo, on CPU tensors: the calls that Megatron-Core makes of both buffers.

It checks what it is given and moves real rows. It says nothing about DeepEP itself.
"""

import torch
import torch.distributed as dist

from deep_ep.utils import EventOverlap


def of_all(group, value):
    every = [None] * group.size()
    dist.all_gather_object(every, value, group=group)
    return every


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes, ranks):
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, ranks):
        return 0


class Buffer:
    """A token goes once to each rank that holds one of its experts. A handle: [T, R] bool of every rank."""

    def __init__(self, group, num_nvl_bytes, num_rdma_bytes):
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.rank, self.ranks = group.rank(), group.size()

    @staticmethod
    def get_dispatch_config(ranks):
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts, **options):
        assert topk_idx.dtype == torch.int64 and topk_idx.dim() == 2 and topk_idx.is_contiguous()
        owner = topk_idx // (num_experts // self.ranks)
        in_rank = torch.stack([(owner == r).any(1) for r in range(self.ranks)], 1)
        per_expert = torch.bincount(topk_idx.reshape(-1), minlength=num_experts)
        return in_rank.sum(0), None, per_expert, in_rank, EventOverlap()

    def _here(self, handle, values):
        return torch.cat(
            [v[m[:, self.rank]] for v, m in zip(of_all(self.group, values), handle, strict=True)]
        )

    def dispatch(self, x, *, handle=None, topk_idx=None, topk_weights=None, is_token_in_rank=None,
                 num_tokens_per_expert=None, **options):  # fmt: skip
        assert x.dtype == torch.bfloat16 and x.is_contiguous()
        if handle is not None:
            return self._here(handle, x), None, None, None, None, EventOverlap()
        assert topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape
        handle, local = of_all(self.group, is_token_in_rank), len(num_tokens_per_expert) // self.ranks
        ids, weights = self._here(handle, topk_idx), self._here(handle, topk_weights)
        mine = ids // local == self.rank
        ids, weights = torch.where(mine, ids - self.rank * local, -1), torch.where(mine, weights, 0)
        counts = torch.bincount(ids[mine], minlength=local).tolist()
        return self._here(handle, x), ids, weights, counts, handle, EventOverlap()

    def _back(self, handle, values):
        parts = of_all(self.group, values.split([int(m[:, self.rank].sum()) for m in handle]))
        mine = handle[self.rank]
        out = torch.zeros(len(mine), *values.shape[1:])
        for r, part in enumerate(parts):
            out[mine[:, r]] += part[self.rank].float()
        return out.to(values.dtype)

    def combine(self, x, handle, topk_weights=None, **options):
        assert x.is_contiguous() and x.dtype == torch.bfloat16
        weights = None if topk_weights is None else self._back(handle, topk_weights)
        return self._back(handle, x), weights, EventOverlap()

    @staticmethod
    def set_num_sms(num_sms):
        pass


class HybridEPBuffer:
    """Rows come sorted by expert. A handle: the [T, E] bool of every rank."""

    def __init__(self, *, group, hidden_dim, max_num_of_tokens_per_rank, num_local_experts, use_fp8, **sms):
        assert not use_fp8
        self.group, self.rank = group, group.rank()
        self.hidden, self.most, self.local = hidden_dim, max_num_of_tokens_per_rank, num_local_experts

    def _rows(self, handle):
        """(rank, token, expert) of each row here."""
        experts = range(self.rank * self.local, (self.rank + 1) * self.local)
        return [
            (r, t, e) for e in experts for r, m in enumerate(handle) for t in m[:, e].nonzero()[:, 0].tolist()
        ]

    def dispatch_with_permute(self, *, hidden, routing_map=None, probs=None, scaling_factor, handle=None,
                              num_of_experts_per_rank=None, pad_multiple, num_permuted_tokens=None,
                              non_blocking=None):  # fmt: skip
        assert hidden.dtype == torch.bfloat16 and scaling_factor is None and pad_multiple is None
        assert len(hidden) <= self.most and hidden.shape[1] == self.hidden
        xs = of_all(self.group, hidden)
        if handle is not None:
            rows = self._rows(handle)
            assert num_permuted_tokens == len(rows)
            return torch.stack([xs[r][t] for r, t, _ in rows]), None, None, None, handle
        assert routing_map.dtype == torch.bool and probs.dtype == torch.float32
        assert routing_map.shape == probs.shape and num_of_experts_per_rank == self.local
        handle, every = of_all(self.group, routing_map), of_all(self.group, probs.detach())
        rows = self._rows(handle)
        counts = torch.bincount(
            torch.tensor([e for *_, e in rows]) - self.rank * self.local, minlength=self.local
        )
        weights = torch.stack([every[r][t, e] for r, t, e in rows])
        return torch.stack([xs[r][t] for r, t, _ in rows]), weights, None, counts, handle

    def combine_with_unpermute(self, *, hidden, probs=None, handle, pad_multiple):
        assert hidden.dtype == torch.bfloat16 and pad_multiple is None
        rows, mine = self._rows(handle), handle[self.rank]
        out, weights = torch.zeros(len(mine), self.hidden), torch.zeros(mine.shape)
        for theirs, xs, ps in of_all(self.group, (rows, hidden, probs)):
            for i, (r, t, e) in enumerate(theirs):
                if r == self.rank:
                    out[t] += xs[i].float()
                    weights[t, e] += 0 if ps is None else ps[i]
        return out.to(hidden.dtype), None if probs is None else weights
