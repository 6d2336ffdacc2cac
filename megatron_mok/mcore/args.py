"""`--mok-*` arguments: one for each field of MokConfig, added to Megatron's own parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ..config import BACKENDS, MAIN_GRAD, PRECISIONS, MokConfig, configure, current
from ..errors import ConfigError, Problem
from .refusals import NAME, validate

_OPTIONS: dict[str, dict[str, Any]] = {
    "comm_sms": dict(type=int, nargs=2, metavar=("FORWARD", "BACKWARD"), help="SMs that move data; even"),
    "minibatch_rows": dict(type=int, help="routed rows of GEMM 1 before GEMM 2 follows; multiple of 128"),
    "ring_rows": dict(type=int, help="rows of the local rings; multiple of 128"),
    "save_capacity": dict(
        type=float, help="rows of h saved for backward / (tokens * top-k); 0 recomputes all"
    ),
    "num_sms": dict(type=int, help="SMs that the kernels use in all; even"),
    "precision": dict(choices=PRECISIONS, help="arithmetic of the expert GEMMs"),
    "backend": dict(choices=BACKENDS, help="auto: cuda on a supported GPU, reference without a GPU"),
    "timeout_s": dict(type=float, help="longest wait for a peer in seconds"),
    "preset": dict(help="name or path of a set of tuned knobs"),
    "max_tokens": dict(
        type=int, help="tokens per rank and call; default micro batch * sequence length / (TP * CP)"
    ),
    "main_grad": dict(choices=MAIN_GRAD, help="auto: add weight gradients into main_grad where DDP made one"),
    "shared_device": dict(action="store_true", help="allow two ranks on one GPU (functional tests; slow)"),
    "check_every": dict(type=int, help="compare one layer with the reference every so many steps; 0: never"),
}
assert set(_OPTIONS) == {f.name for f in fields(MokConfig)}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--mok-*` group. Unset arguments are None: what configure() was given before stays."""
    group = parser.add_argument_group(
        "megatron_mok", f"Knobs of --moe-token-dispatcher-type {NAME}; see megatron_mok.MokConfig."
    )
    for name, options in _OPTIONS.items():
        group.add_argument(f"--mok-{name.replace('_', '-')}", dest=f"mok_{name}", default=None, **options)
    return parser


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of MokConfig that stand on the command line."""
    values = {name: getattr(args, f"mok_{name}", None) for name in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def configure_from(args: argparse.Namespace) -> None:
    """Judge the whole command line and make its `--mok-*` arguments the process's configuration.

    ConfigError with every offender: settings that mok refuses, knobs that cannot be used, knobs given
    together with another dispatcher. Nothing is judged where a YAML file takes the place of the arguments.
    """
    if getattr(args, "yaml_cfg", None) is not None:
        return
    knobs = given(args)
    if args.moe_token_dispatcher_type != NAME:
        if knobs:
            raise ConfigError(
                [
                    Problem(
                        f"--mok-{name.replace('_', '-')}",
                        value,
                        f"--moe-token-dispatcher-type {NAME} (it is {args.moe_token_dispatcher_type})",
                        "drop the knob or change the dispatcher",
                    )
                    for name, value in knobs.items()
                ],
                where="arguments",
            )
        return
    found: list[Problem] = []
    for judge in (lambda: configure(current(), **knobs), lambda: validate(args)):
        try:
            judge()
        except ConfigError as error:
            found += error.problems
    if found:
        raise ConfigError(found, where=f"--moe-token-dispatcher-type {NAME}")
    if current().max_tokens is None and (tokens := tokens_per_call(args)):
        configure(max_tokens=tokens)


def tokens_per_call(args: argparse.Namespace) -> int | None:
    """micro_batch_size * seq_length / (TP * CP), rounded up; None where a size is not given."""
    sequence = getattr(args, "seq_length", None) or getattr(args, "encoder_seq_length", None)
    if not sequence or not args.micro_batch_size:
        return None
    ranks = (args.tensor_model_parallel_size or 1) * (args.context_parallel_size or 1)
    return -(-args.micro_batch_size * sequence // ranks)


def wrap(add_megatron_arguments: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's function with our arguments; whoever parses with that parser also configures this
    process."""

    def add_with_mok(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_arguments(add_megatron_arguments(parser))
        parse_known_args = parser.parse_known_args

        def parse(*args: Any, **kwargs: Any) -> Any:
            namespace, rest = parse_known_args(*args, **kwargs)
            if not rest:  # unknown arguments are the caller's to report, before ours are judged
                configure_from(namespace)
            return namespace, rest

        parser.parse_known_args = parse  # type: ignore[method-assign]
        return parser

    return add_with_mok
