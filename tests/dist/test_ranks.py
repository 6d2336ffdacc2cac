"""Runs tests/dist/ranks.py in four gloo processes, started once, and reports each of its cases."""

import ast
from pathlib import Path

import pytest

from tests.dist import harness

SCRIPT = Path(__file__).with_name("ranks.py")
SIZE = 4


def cases():
    """The names in the script's @case decorators, without importing it."""
    return [
        ast.literal_eval(decorator.args[0])
        for node in ast.parse(SCRIPT.read_text()).body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call)
    ]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return harness.run(SCRIPT, SIZE, tmp_path_factory.mktemp("ranks"), timeout_s=200)


@pytest.mark.parametrize("name", [*cases(), "exit"])
def test_case(results, name):
    failed = {
        rank: theirs.get(name, {"error": "did not get there: " + theirs["exit"]["error"]})["error"]
        for rank, theirs in enumerate(results)
    }
    assert not any(failed.values()), "\n".join(f"rank {r}:\n{error}" for r, error in failed.items() if error)
