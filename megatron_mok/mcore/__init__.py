"""Megatron-Core: `register()` makes it know the token dispatcher "mok"; `unregister()` takes that back.

Megatron-Core has no registry for dispatchers. Four names are rebound, nothing else is touched, and layers of
other dispatcher types stay stock:

    TransformerConfig.moe_token_dispatcher_type   the field's type also lists "mok" (Megatron's argparse reads
    it) TransformerConfig.__post_init__               refuses first what mok cannot do, in one message
    moe_module_specs.MoELayer                     layer specs name our subclass
    data parallel wrapper's __init__              the built model is checked, and one line says what runs

and, where megatron.training is installed, its add_megatron_arguments also adds `--mok-*`.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import typing
import warnings
from typing import Any

from .refusals import NAME, validate

_undo: list[tuple[Any, str, Any]] = []
_announced = False
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
    global _announced
    while _undo:
        owner, name, old = _undo.pop()
        setattr(owner, name, old)
    _announced = False


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

    from megatron.core.distributed.data_parallel_base import _BaseDataParallel

    wrap_model = _BaseDataParallel.__init__

    @functools.wraps(wrap_model)
    def check_then_wrap(self: Any, config: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        wrap_model(self, config, module, *args, **kwargs)
        _check(self, config, module)

    _rebind(_BaseDataParallel, "__init__", check_then_wrap)

    if importlib.util.find_spec("megatron.training") is not None:
        from .args import wrap

        arguments = importlib.import_module("megatron.training.arguments")
        _rebind(arguments, "add_megatron_arguments", wrap(arguments.add_megatron_arguments))


def _check(wrapper: Any, config: Any, model: Any) -> None:
    """The built model must consist of our layers, in Megatron's own data parallelism; say what runs."""
    global _announced
    if getattr(config, "moe_token_dispatcher_type", None) != NAME or not config.num_moe_experts:
        return
    import torch
    from megatron.core.distributed import DistributedDataParallel

    from ..config import current
    from ..errors import ConfigError, Problem
    from ..runtime import choose_backend
    from .layer import check_applied

    if not isinstance(wrapper, DistributedDataParallel):
        need = "Megatron's DistributedDataParallel (others are not tested)"
        problem = Problem("data parallelism", type(wrapper).__name__, need, "drop the FSDP options")
        raise ConfigError([problem], where=f"moe_token_dispatcher_type={NAME!r}")
    layers = check_applied(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    backend, why = choose_backend(current(), device)
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if first and not _announced:
        print(f"megatron_mok: {layers} MoE layers on this rank, {backend} back end ({why})", flush=True)
    _announced = True
