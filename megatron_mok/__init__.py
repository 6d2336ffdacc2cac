"""Megatron-Core MoE layers computed by one fused kernel that also moves the tokens between ranks.

    import megatron_mok

    megatron_mok.register()                                   # Megatron-Core now knows the dispatcher "mok"
    megatron_mok.configure(megatron_mok.MokConfig(backend="auto"))

Importing this package loads no CUDA, no shared library, no torch and no Megatron: every public name is
fetched at first use.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "megatron_mok.mcore": ("register", "unregister", "is_registered"),
    "megatron_mok.config": ("MokConfig", "configure", "current"),
    "megatron_mok.runtime": ("workspace_bytes", "saved_bytes", "reserve", "release"),
    "megatron_mok.errors": (
        "MokError",
        "ConfigError",
        "LibraryMissing",
        "PeerAbort",
        "PeerTimeout",
        "Problem",
        "ProtocolMismatch",
        "UnsupportedDevice",
        "WorkspaceTooSmall",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name):
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_HOME_OF})
