"""Megatron-Core: `register()` makes it know the token dispatcher "mok"; `unregister()` takes that back.

Megatron-Core has no registry for dispatchers. These names are rebound, nothing else is touched, and layers of
other dispatcher types stay stock:

    TransformerConfig.moe_token_dispatcher_type  its type also lists "mok" (Megatron's argparse reads it)
    TransformerConfig.__post_init__              refuses first what mok cannot do, in one message
    moe_module_specs.MoELayer                    layer specs name our subclass
    _BaseDataParallel.__init__                   refuses data parallel wrappers other than Megatron's DDP
    DistributedDataParallel.__init__             checks the built model, and says in one line what runs
    arguments.add_megatron_arguments             adds `--mok-*`, where megatron.training is installed
    training.training_log                        gives its writers our figures, likewise
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import typing
import warnings
from typing import Any

from ..errors import ConfigError, Problem, of_peer
from . import figures, report
from .refusals import NAME, validate

_undo: list[tuple[Any, str, Any]] = []
# Modules that copy MoELayer into a layer spec while they are imported.
_SPECS_AT_IMPORT = (
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "megatron.core.models.mamba.mamba_layer_specs",
)


def is_registered() -> bool:
    """True between register() and unregister()."""
    return bool(_undo)


def register() -> None:
    """Teach Megatron-Core the dispatcher type "mok". Idempotent; call it before layer specs are made.

    Warns where hybrid models' specs, which Megatron makes at import, are there already: these stay stock.
    """
    if _undo:
        return
    if late := [name for name in _SPECS_AT_IMPORT if name in sys.modules]:
        warnings.warn(
            f"megatron_mok.register() comes after the import of {', '.join(late)}: hybrid models will not "
            "know the dispatcher 'mok'. Register before importing megatron.training",
            stacklevel=2,
        )
    try:
        _hook()
    except BaseException:
        unregister()
        raise


def unregister() -> None:
    """Restore Megatron-Core. Layers that were built as mok layers stay what they are."""
    while _undo:
        owner, name, old = _undo.pop()
        setattr(owner, name, old)
    report.forget()
    figures.forget()


def _rebind(owner: Any, name: str, value: Any) -> None:
    _undo.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def _hook() -> None:
    from megatron.core.models.gpt import moe_module_specs
    from megatron.core.transformer import TransformerConfig

    from .layer import MokMoELayer

    field = TransformerConfig.__dataclass_fields__["moe_token_dispatcher_type"]
    _rebind(field, "type", typing.Literal[(*typing.get_args(field.type), NAME)])

    post_init = TransformerConfig.__post_init__

    @functools.wraps(post_init)
    def validate_first(self: Any) -> None:
        validate(self)
        post_init(self)

    _rebind(TransformerConfig, "__post_init__", validate_first)
    _rebind(moe_module_specs, "MoELayer", MokMoELayer)

    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel

    wrap_any, wrap_model = _BaseDataParallel.__init__, DistributedDataParallel.__init__

    @functools.wraps(wrap_any)
    def refuse_others(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if _is_mok(config) and not isinstance(self, DistributedDataParallel):
            need = "Megatron's DistributedDataParallel (others are not tested)"
            problem = Problem("data parallelism", type(self).__name__, need, "drop the FSDP options")
            raise ConfigError([problem], where=f"moe_token_dispatcher_type={NAME!r}")
        wrap_any(self, config, *args, **kwargs)

    @functools.wraps(wrap_model)
    def wrap_then_check(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        failure = None
        try:
            wrap_model(self, config, *args, **kwargs)
        except Exception as error:
            if not _is_mok(config) or not hasattr(self, "ep_group"):  # it has no peers yet that could be told
                raise
            failure = error
        if _is_mok(config):
            _check(self, failure)

    _rebind(_BaseDataParallel, "__init__", refuse_others)
    _rebind(DistributedDataParallel, "__init__", wrap_then_check)

    if importlib.util.find_spec("megatron.training") is not None:
        from .args import wrap

        arguments = importlib.import_module("megatron.training.arguments")
        _rebind(arguments, "add_megatron_arguments", wrap(arguments.add_megatron_arguments))
        training = importlib.import_module("megatron.training.training")
        _rebind(training, "training_log", figures.wrap(training.training_log))


def _is_mok(config: Any) -> bool:
    return getattr(config, "moe_token_dispatcher_type", None) == NAME and bool(config.num_moe_experts)


def _check(wrapper: Any, mine: Exception | None) -> None:
    """The model that Megatron's DDP has wrapped must consist of our layers; one line says what runs.

    Collective over the ranks that hold the model. What one rank finds wrong, or `mine`, with which Megatron's
    constructor has ended here, is an error on all: its own
    there, and one that names the rank and the cause elsewhere.
    """
    import torch

    from .. import runtime
    from ..config import current
    from .layer import check_applied

    backend, why = "", ""
    try:
        if mine is None:
            check_applied(wrapper.module)
            device = next((p.device for p in wrapper.parameters()), torch.device("cpu"))
            backend, why = runtime.choose_backend(current(), device)
    except Exception as error:  # told to the peers, then raised
        mine = error
    told = _tell(wrapper, (report.pending(), mine and (type(mine).__name__, str(mine))))
    if mine is not None:
        raise mine
    for rank, (_, theirs) in sorted(told.items()):
        if theirs:
            raise of_peer(rank, *theirs)
    first = min((rank for rank, (layers, _) in told.items() if layers), default=None)
    report.say(backend, why, speaker=first)


def _tell(wrapper: Any, message: Any) -> dict[int, Any]:
    """The messages of all ranks that hold parts or copies of the model. Collective.

    One group after the other, each time passing on all that is known: together they span the model, also
    where other models live on other ranks of the job.
    """
    import torch.distributed as dist

    told = {report.rank(): message}
    if dist.is_initialized():
        pipeline = [] if isinstance(wrapper.pp_group, list) else [wrapper.pp_group]  # several: no one order
        for group in (wrapper.ep_group, wrapper.tp_group, wrapper.dp_cp_group, *pipeline):
            every: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(every, told, group=group)
            for theirs in every:
                told |= theirs
    return told
