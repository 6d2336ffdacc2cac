"""One frozen configuration for the process, and one predicate per constraint.

Symbols: H hidden size, I expert intermediate size, K experts per token, E experts, R ranks,
L = E/R local experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from .errors import ConfigError, Problem

BACKENDS = ("auto", "cuda", "reference")
PRECISIONS = ("bf16",)
MAIN_GRAD = ("auto", "on", "off")


@dataclass(frozen=True)
class MokConfig:
    """Every knob. Raises ConfigError listing all unusable values. Each is also a `--mok-*` argument.

    comm_sms        SMs whose spare warps move rows in (forward, backward); even numbers. None: all.
    minibatch_rows  routed rows that GEMM 1 works on before GEMM 2 follows; a multiple of 128.
    ring_rows       rows of the local rings for x, act, dy and dh; a multiple of 128. Less costs time only.
    save_capacity   rows of h saved for backward, in units of tokens here * top-k; the rest is recomputed.
    num_sms         SMs (thread blocks) that the kernels use in all; even.
    precision       arithmetic of the expert GEMMs on the GPU.
    backend         "cuda" (the kernels), "reference" (plain torch, runs on the CPU), "auto" (cuda on a
                    supported GPU, reference on a machine without a GPU, an error on an unsupported GPU).
    timeout_s       longest wait for a peer in seconds. None: the smaller of 300 and half of the process
                    group's time-out.
    preset          for sets of tuned knobs. There are none yet, so only None.
    max_tokens      tokens per rank and call that the workspace is made for. None:
                    micro_batch_size (the larger of training's and evaluation's) * seq_length / (TP * CP)
                    where the arguments are known, else the first call's tokens.
    main_grad       "auto": weight gradients are added into main_grad wherever Megatron's DDP made one;
                    "on": an error where there is none; "off": always returned to autograd.
    shared_device   allow two ranks on one GPU (for functional tests; slow).
    check_every     compare one layer with the reference in every so many of its training forwards (one a
                    micro-batch); 0 = never.
    """

    comm_sms: tuple[int, int] | None = None
    minibatch_rows: int | None = None
    ring_rows: int | None = None
    save_capacity: float = 1.25
    num_sms: int | None = None
    precision: str = "bf16"
    backend: str = "auto"
    timeout_s: float | None = None
    preset: str | None = None
    max_tokens: int | None = None
    main_grad: str = "auto"
    shared_device: bool = False
    check_every: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.comm_sms, list):  # argparse and YAML make lists
            object.__setattr__(self, "comm_sms", tuple(self.comm_sms))
        problems = [
            Problem(c.field, getattr(self, c.field), c.need, c.remedy)
            for c in CONSTRAINTS
            if not c.holds(getattr(self, c.field))
        ]
        if problems:
            raise ConfigError(problems, where="MokConfig")

    def with_(self, **changes: Any) -> MokConfig:
        """A copy with some fields changed, validated again."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Constraint:
    """One rule on one value: serves validation, tuning (which values to try) and the error text."""

    field: str
    holds: Callable[[Any], bool]
    need: str
    remedy: str


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _even(value: Any, least: int = 2) -> bool:
    return _is_int(value) and value >= least and value % 2 == 0


def _optional(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or rule(value)


def _rows(value: Any) -> bool:
    return _is_int(value) and value > 0 and value % 128 == 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


CONSTRAINTS = (
    Constraint(
        "comm_sms",
        _optional(lambda v: isinstance(v, tuple) and len(v) == 2 and all(_even(n) for n in v)),
        "two positive even numbers (forward, backward)",
        "pass for example --mok-comm-sms 8 16, or leave it out",
    ),
    Constraint(
        "minibatch_rows", _optional(_rows), "a positive multiple of 128", "round it to a multiple of 128"
    ),
    Constraint("ring_rows", _optional(_rows), "a positive multiple of 128", "round it to a multiple of 128"),
    Constraint(
        "save_capacity",
        lambda v: _number(v) and v >= 0,
        "a finite number >= 0",
        "use 0 to recompute everything, 1.25 (the default) to save balanced loads with a margin",
    ),
    Constraint("num_sms", _optional(_even), "a positive even number", "leave it out to use every SM"),
    Constraint("precision", lambda v: v in PRECISIONS, f"one of {PRECISIONS}", "use bf16"),
    Constraint("backend", lambda v: v in BACKENDS, f"one of {BACKENDS}", "use auto"),
    Constraint(
        "timeout_s",
        _optional(lambda v: _number(v) and v > 0),
        "a positive number of seconds",
        "leave it out for the default, there is no unbounded wait",
    ),
    Constraint(
        "preset",
        lambda v: v is None,
        "it unset (tuned presets do not exist yet)",
        "leave it out and give the knobs one by one",
    ),
    Constraint(
        "max_tokens",
        _optional(lambda v: _is_int(v) and v > 0),
        "a positive integer",
        "leave it out to derive it from the batch and sequence length",
    ),
    Constraint("main_grad", lambda v: v in MAIN_GRAD, f"one of {MAIN_GRAD}", "use auto"),
    Constraint("shared_device", lambda v: isinstance(v, bool), "True or False", "leave it out"),
    Constraint("check_every", lambda v: _is_int(v) and v >= 0, "an integer >= 0", "use 0 for never"),
)
assert {c.field for c in CONSTRAINTS} == {f.name for f in fields(MokConfig)}


# What the kernels are written for: sizes of a MoE layer.
KERNEL_LIMITS = (
    Constraint(
        "hidden", lambda v: v > 0 and v % 128 == 0, "a positive multiple of 128", "choose another size"
    ),
    Constraint("ffn", lambda v: v > 0 and v % 128 == 0, "a multiple of 128", "choose another size"),
    Constraint("top_k", lambda v: 1 <= v <= 32, "1 to 32", "choose a smaller top-k"),
    Constraint("local_experts", lambda v: 1 <= v <= 512, "1 to 512", "use more expert-parallel ranks"),
    Constraint(
        "ranks", lambda v: 1 <= v <= 72, "1 to 72", "use fewer expert-parallel ranks or another dispatcher"
    ),
)


def kernel_problems(names: dict[str, str] | None = None, **sizes: int) -> list[Problem]:
    """Sizes (any of hidden, ffn, top_k, local_experts, ranks) that the CUDA kernels refuse.

    `names` gives the caller's name for a size, which then stands in the message.
    """
    named = names or {}
    return [
        Problem(
            named.get(limit.field, limit.field), sizes[limit.field], f"{limit.need} on the GPU", limit.remedy
        )
        for limit in KERNEL_LIMITS
        if limit.field in sizes and not limit.holds(sizes[limit.field])
    ]


_current = MokConfig()


def configure(config: MokConfig | None = None, /, **changes: Any) -> MokConfig:
    """Make `config` (default: the present one), with `changes`, the one of this process; returns it.

    Layers read it when they are built, the runtime when a workspace is made: configure before that.
    """
    global _current
    base = _current if config is None else config
    if not isinstance(base, MokConfig):
        raise TypeError(f"configure takes a MokConfig, got {type(base).__name__}")
    _current = base.with_(**changes) if changes else base
    return _current


def current() -> MokConfig:
    """The configuration of this process."""
    return _current
