"""Tests of the kernels. Each is skipped, with the reason, where they cannot run."""

from functools import cache

import pytest
import torch

from megatron_mok import errors, native


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
