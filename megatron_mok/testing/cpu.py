"""Stand-ins that let Megatron-Core and megatron.training run on a CPU with gloo. For demos and tests only.

    from megatron_mok.testing import cpu

    cpu.install()        # before the model is built; importing this module alone changes nothing
    ...
    cpu.uninstall()      # puts everything back

Megatron-Core assumes CUDA in a few places although its arithmetic does not need it: streams and events,
the device of new tensors, the random number tracker, names of tensor types. Each stand-in below says what it
is for. `torch.cuda.is_available()` keeps telling the truth (False), so nothing else believes in a GPU.

What it does not give: tensor parallelism above 1 (torch's norms know no sequence parallelism), Transformer
Engine's classes, grouped GEMM, a core attention for MLA (examples/attention.py has one). Models must be built
with use_cpu_initialization=True, the local layer spec, the fusions off; the training loop with
--distributed-backend gloo --transformer-impl local --use-cpu-initialization, and with overlapped
point-to-point communication where stages are virtual.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

_MISSING = object()
_undo: list[tuple[Any, str, Any]] = []


def installed() -> bool:
    """True between install() and uninstall()."""
    return bool(_undo)


def install(training: bool = False) -> None:
    """Put the stand-ins in place; a second call only adds what the first left out.

    training    also prepare megatron.training (its loop, its initialisation, its data set helpers).
    Raises RuntimeError on a machine with a GPU: nothing needs to stand in there.
    """
    if torch.cuda.is_available():
        raise RuntimeError(
            "this machine has a GPU: run Megatron on it, or hide it with CUDA_VISIBLE_DEVICES=''"
        )
    if not _undo:
        _torch()
        _core()
    if training and importlib.util.find_spec("megatron.training") is not None:
        _training()


def uninstall() -> None:
    """Restore everything that install() changed."""
    while _undo:
        owner, name, old = _undo.pop()
        if old is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, old)


def _set(owner: Any, name: str, value: Any) -> None:
    if any(o is owner and n == name for o, n, _ in _undo):
        return
    _undo.append((owner, name, vars(owner).get(name, _MISSING)))
    setattr(owner, name, value)


# --- torch ---


class _Stream:
    """A stream that is always up to date."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = _nothing

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Event:
    """An event that has happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    record = wait = synchronize = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: _Event) -> float:
        return 0.0


_STREAM = _Stream()


@contextlib.contextmanager
def _within(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _no_op() -> Callable[..., None]:
    """A new function that does nothing: Dynamo wants one object for each of torch's names."""
    return lambda *_, **__: None


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """`factory` with device="cuda" turned into the CPU."""

    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        return factory(*args, **kwargs)

    return make


_FACTORIES = (
    *(
        "tensor",
        "as_tensor",
        "zeros",
        "ones",
        "empty",
        "full",
        "arange",
        "linspace",
        "rand",
        "randn",
        "randint",
    ),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "eye"),
)
_METHODS = ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor")


def _torch() -> None:
    # Dynamo maps torch's functions to rules when first imported: let that be before they are replaced. It is
    # switched off because Megatron wraps small functions in torch.compile: seconds of compilation on tiny
    # models.
    _set(importlib.import_module("torch._dynamo.config"), "disable", True)
    cpu = torch.device("cpu")
    cuda = torch.cuda
    _set(cuda, "current_device", lambda: cpu)
    _set(cuda, "set_device", _no_op())
    _set(cuda, "synchronize", _no_op())
    _set(cuda, "empty_cache", _no_op())
    for name in ("Stream", "Event"):
        _set(cuda, name, {"Stream": _Stream, "Event": _Event}[name])
    for name in ("current_stream", "default_stream"):
        _set(cuda, name, lambda *_: _STREAM)
    _set(cuda, "set_stream", _no_op())
    _set(cuda, "stream", _within)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        _set(cuda, name, lambda *_: 0)
    _set(cuda, "device_memory_used", lambda *_: 0)
    _set(cuda, "reset_peak_memory_stats", _no_op())
    # Megatron asks for the architecture to choose defaults; Ampere asks for nothing special.
    _set(cuda, "get_device_capability", lambda *_: (8, 0))
    _set(cuda, "get_device_properties", lambda *_: SimpleNamespace(major=8, minor=0, total_memory=1 << 34))
    # One generator serves as "the GPU's": forks of Megatron's tracker (below) save and restore it.
    _set(cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state())
    _set(cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state))
    _set(cuda, "manual_seed", lambda seed: torch.manual_seed(seed))
    for name in ("Float", "Double", "Half", "BFloat16", "Byte", "Int", "Long", "Bool"):
        _set(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))

    # Tensors asked for on "cuda" are made on, or stay on, the CPU.
    for name in _FACTORIES:
        _set(torch, name, _on_cpu(getattr(torch, name)))
    for name in _METHODS:
        _set(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))
    to, kind, module_to = torch.Tensor.to, torch.Tensor.type, torch.nn.Module.to
    _set(torch.Tensor, "cuda", lambda self, *_, **__: self)
    _set(torch.nn.Module, "cuda", lambda self, *_, **__: self)

    def redirect(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            args = tuple(cpu if _is_cuda(arg) else arg for arg in args)
            return _on_cpu(method)(self, *args, **kwargs)

        return call

    _set(torch.Tensor, "to", redirect(to))
    _set(torch.nn.Module, "to", redirect(module_to))

    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Megatron's optimizers compare names such as 'torch.cuda.FloatTensor'."""
        if dtype is None:
            return kind(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return kind(self, dtype, *args, **kwargs)

    _set(torch.Tensor, "type", type_name)


# --- Megatron-Core ---


def _core() -> None:
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    _set(random, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())
    _set(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))

    @contextlib.contextmanager
    def fork(self: Any, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """As Megatron's, without its warning that the CPU's generator has moved: here it is the tracked
        one."""
        saved = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(saved)

    _set(random.CudaRNGStatesTracker, "fork", fork)

    # The all-to-all dispatcher hands split sizes to torch.distributed: lists or arrays, never tensors.
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    _set(dispatcher, "maybe_move_tensor_to_cpu", to_host)

    # Newer versions test for this class with isinstance; without Transformer Engine the name is None.
    with contextlib.suppress(ImportError):
        layers = importlib.import_module("megatron.core.tensor_parallel.inference_layers")
        for name, value in list(vars(layers).items()):
            if name.endswith("Linear") and value is None:
                _set(layers, name, type(name, (), {}))

    # A wheel holds the compiled helper but no Makefile; make's failure would end the process.
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        _set(importlib.import_module("megatron.core.datasets.utils"), "compile_helpers", _no_op())


# --- megatron.training ---


def _training() -> None:
    initialize = importlib.import_module("megatron.training.initialize")
    training = importlib.import_module("megatron.training.training")
    package = importlib.import_module("megatron.training")

    without_cuda = functools.wraps(initialize.initialize_megatron)(
        functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    )
    for module in (initialize, training, package):
        if hasattr(module, "initialize_megatron"):
            _set(module, "initialize_megatron", without_cuda)

    # Megatron builds its groups and seeds its tracker only where it counts a GPU.
    _set(torch.cuda, "device_count", lambda: 1)
