"""Four gloo ranks, and two, for the whole folder; they start when a test first runs something on them."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from ranks import Ranks


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "short: the part that also runs with the older supported Megatron-Core"
    )


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, prepare="model") as pool:
        yield pool


@pytest.fixture(scope="session")
def pair() -> Iterator[Ranks]:
    """For what four ranks would only repeat: half the time on a machine with two cores."""
    with Ranks(2, prepare="model") as pool:
        yield pool
