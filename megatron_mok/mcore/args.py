"""`--mok-*` arguments: one for each field of MokConfig, added to Megatron's own parser."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from ..config import BACKENDS, MAIN_GRAD, PRECISIONS, MokConfig, configure, current
from ..errors import ConfigError, Problem
from .refusals import NAME, validate

_OPTIONS: dict[str, dict[str, Any]] = {
    "comm_sms": dict(
        type=int, nargs=2, metavar=("FORWARD", "BACKWARD"), help="SMs that move rows; even; default all"
    ),
    "minibatch_rows": dict(type=int, help="routed rows of GEMM 1 before GEMM 2 follows; multiple of 128"),
    "ring_rows": dict(type=int, help="rows of the local rings; multiple of 128"),
    "save_capacity": dict(
        type=float, help="rows of h saved for backward / (tokens * top-k); 0 recomputes all"
    ),
    "num_sms": dict(type=int, help="SMs that the kernels use in all; even"),
    "precision": dict(choices=PRECISIONS, help="arithmetic of the expert GEMMs"),
    "backend": dict(choices=BACKENDS, help="auto: cuda on a supported GPU, reference without a GPU"),
    "timeout_s": dict(type=float, help="longest wait for a peer in seconds"),
    "preset": dict(help="for sets of tuned knobs: there are none yet, so leave it out"),
    "max_tokens": dict(
        type=int,
        help="tokens per rank and call; default micro batch (the larger of training's and evaluation's) * "
        "sequence length / (TP * CP)",
    ),
    "main_grad": dict(choices=MAIN_GRAD, help="auto: add weight gradients into main_grad where DDP made one"),
    "shared_device": dict(action="store_true", help="allow two ranks on one GPU (functional tests; slow)"),
    "check_every": dict(type=int, help="compare a layer with the reference in every N-th forward; 0: never"),
}
assert set(_OPTIONS) == {f.name for f in fields(MokConfig)}


_DISPATCHER = "--moe-token-dispatcher-type"
_derived: int | None = None  # max_tokens that the last command line gave; the next one's takes its place


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the `--mok-*` group. Unset arguments are None: what configure() was given before stays."""
    group = parser.add_argument_group(
        "megatron_mok", f"Knobs of --moe-token-dispatcher-type {NAME}; see megatron_mok.MokConfig."
    )
    for name, options in _OPTIONS.items():
        group.add_argument(_flag(name), dest=f"mok_{name}", default=None, **options)
    return parser


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of MokConfig that stand on the command line."""
    values = {name: getattr(args, f"mok_{name}", None) for name in _OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def configure_from(args: argparse.Namespace, words: Sequence[str], unknown: Sequence[str] = ()) -> None:
    """Judge the whole command line and make its `--mok-*` arguments the process's configuration.

    ConfigError with every offender: settings that mok refuses, knobs that cannot be used, do not exist or are
    given together with another dispatcher. With --yaml-cfg, where Megatron drops all arguments for those in
    the file, the knobs count, and the file's dispatcher does: where either is mok, one in `words`, the
    command line, must be the same. The file's other settings are judged when the TransformerConfig is made.
    `unknown` words that are not ours are the caller's to report.
    """
    knobs, yaml = given(args), getattr(args, "yaml_cfg", None)
    asked = chosen = args.moe_token_dispatcher_type
    source = f"{_DISPATCHER} {NAME}"
    if yaml is not None:
        chosen = _dispatcher_in(yaml)
        source = f"moe_token_dispatcher_type: {NAME} under language_model in {yaml}"
        if _DISPATCHER not in {word.partition("=")[0] for word in words}:  # what args has is the default
            asked = chosen
    found = [
        Problem(word, "no such argument", f"one of {', '.join(map(_flag, _OPTIONS))}", "correct its name")
        for word in unknown
        if word.startswith("--mok-")
    ]
    if asked != chosen and NAME in (asked, chosen):
        need = f"what the YAML file says ({chosen}): with --yaml-cfg Megatron reads no other argument"
        remedy = f"write {source}; --mok-* stay here" if asked == NAME else "leave it out or change the file"
        found.append(Problem(_DISPATCHER, asked, need, remedy))
    if NAME in (asked, chosen):
        found += _problems(lambda: configure(current(), **knobs))
    else:
        need = f"{source} (it is {chosen})"
        remedy = "drop the knob or change the dispatcher"
        found += [Problem(_flag(name), value, need, remedy) for name, value in knobs.items()]
    if yaml is None:
        found += _problems(lambda: validate(args))
    if found:
        raise ConfigError(found, where="arguments")
    global _derived
    if yaml is not None or chosen != NAME or current().max_tokens not in (None, _derived):
        return
    if tokens := tokens_per_call(args):
        _derived = configure(max_tokens=tokens).max_tokens


def _dispatcher_in(yaml: str) -> str | None:
    """What the file of --yaml-cfg chooses; None where it says nothing. Megatron's own error if unreadable."""
    from megatron.training.yaml_arguments import load_yaml

    with contextlib.redirect_stdout(io.StringIO()):  # its warning, which follows when Megatron itself reads
        model = getattr(load_yaml(yaml), "language_model", None)
    return getattr(model, "moe_token_dispatcher_type", None)


def _problems(judge: Callable[[], Any]) -> list[Problem]:
    try:
        judge()
    except ConfigError as error:
        return error.problems
    return []


def _flag(field: str) -> str:
    return f"--mok-{field.replace('_', '-')}"


def tokens_per_call(args: argparse.Namespace) -> int | None:
    """micro_batch_size * seq_length / (TP * CP), rounded up; None where a size is not given.

    Of the micro-batch sizes of training and of evaluation (where Megatron has one) the larger.
    """
    sequence = getattr(args, "seq_length", None) or getattr(args, "encoder_seq_length", None)
    if not sequence or not args.micro_batch_size:
        return None
    batch = max(args.micro_batch_size, getattr(args, "eval_micro_batch_size", None) or 0)
    ranks = (args.tensor_model_parallel_size or 1) * (args.context_parallel_size or 1)
    return -(-batch * sequence // ranks)


def wrap(add_megatron_arguments: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's function with our arguments; whoever parses with that parser also configures this
    process."""

    def add_with_mok(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = add_arguments(add_megatron_arguments(parser))
        parse_known_args = parser.parse_known_args

        def parse(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
            words = sys.argv[1:] if args is None else list(args)
            namespace, rest = parse_known_args(words, namespace)
            configure_from(namespace, words, rest)
            return namespace, rest

        parser.parse_known_args = parse  # type: ignore[assignment, method-assign]
        return parser

    return add_with_mok
