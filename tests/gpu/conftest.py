"""Tests of the kernels. Each is skipped, with the reason, where they cannot run."""

from functools import cache

import pytest
import torch

from megatron_mok import errors, native, runtime
from megatron_mok.config import MokConfig


@cache
def reason_to_skip() -> str | None:
    if not torch.cuda.is_available():
        return "no GPU"
    try:
        native.load_kernels(torch.device("cuda", torch.cuda.current_device()))
    except (errors.LibraryMissing, errors.UnsupportedDevice) as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu" in item.path.as_posix() and (reason := reason_to_skip()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def opened(device):
    """get_comm for one rank and layers like a case, released afterwards."""
    yield lambda case, device=device, **config: runtime.get_comm(
        None,
        hidden=case.hidden,
        top_k=case.top_k,
        num_experts=case.experts,
        max_tokens=case.most_tokens,
        device=device,
        dtype=torch.bfloat16,
        config=MokConfig(backend="cuda", **({"timeout_s": 10.0} | config)),
    )
    runtime.release()
