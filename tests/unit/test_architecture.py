"""Who may import whom, in Python and in C++."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_mok"
CSRC = ROOT / "csrc"

# Lower levels first; a room imports from lower levels and from itself.
LEVELS = (
    {"config", "env", "errors"},
    {"native", "reference"},
    {"ops"},
    {"runtime"},
    {"mcore", "launch"},
    {"bench", "cli"},
)
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
# Stand-ins for demos and tests stand beside the rooms; only what trains may ask for them.
LEVEL["testing"] = LEVEL["mcore"]
MAY_IMPORT_MEGATRON = {"mcore", "bench", "testing"}
MAY_IMPORT_TESTING = {"bench", "testing"}
WITHIN_LEVEL = {
    ("errors", "config"),
    ("env", "config"),
    ("errors", "env"),
    ("mcore", "launch"),
    ("bench", "cli"),
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def room(module: str) -> str:
    """The part of a dotted name that says where it lives: 'ops' of megatron_mok.ops.autograd."""
    return module.split(".")[1] if "." in module else ""


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, top_level_only: bool = False) -> set[str]:
    """Absolute names that a module imports, import_module("...") with a constant included."""
    package = dotted(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{name}.{alias.name}" for alias in node.names] if name == "megatron_mok" else [name]
            # `from . import x` names a module or something in it; both live in the same room.
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module"
        ):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        else:
            continue
        if top_level_only and node not in tree.body:
            continue
        found.update(names)
    return found


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_python_imports_point_downward(path):
    here = room(dotted(path))
    for name in imports(path):
        first = name.split(".")[0]
        if first == "megatron":
            assert here in MAY_IMPORT_MEGATRON, (
                f"{here} imports {name}: only {MAY_IMPORT_MEGATRON} know Megatron"
            )
        if first != "megatron_mok" or not here:
            continue
        there = room(name)
        if there in ("", here) or there not in LEVEL:  # the package itself, or a name that it serves
            continue
        if there == "testing":
            assert here in MAY_IMPORT_TESTING, f"{here} imports {name}: the stand-ins are for demos and tests"
        allowed = LEVEL[there] < LEVEL[here] or (there, here) in WITHIN_LEVEL
        assert allowed, f"{here} imports {name}: {there} is not below it"


def test_every_room_has_a_level():
    rooms = {room(dotted(path)) for path in MODULES} - {""}
    assert rooms <= set(LEVEL), f"no level for {rooms - set(LEVEL)}"


@pytest.mark.parametrize("path", [p for p in MODULES if room(dotted(p)) == "reference"], ids=dotted)
def test_reference_is_torch_alone(path):
    ours = {room(name) for name in imports(path) if name.startswith("megatron_mok")}
    assert ours <= {"reference", "config", "errors"}
    others = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"megatron_mok"}
    assert others <= {"torch"}


LIGHT = [p for p in MODULES if p == PACKAGE / "__init__.py" or room(dotted(p)) in ("cli", "env")]


@pytest.mark.parametrize(
    "path", [p for p in LIGHT if p.stem in ("__init__", "__main__", "doctor", "machine")], ids=dotted
)
def test_doctor_needs_python_3_9_and_the_standard_library(path):
    ast.parse(path.read_text(), feature_version=(3, 9))
    others = {name.split(".")[0] for name in imports(path, top_level_only=True)}
    assert others <= set(sys.stdlib_module_names) | {"megatron_mok", "__future__"}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_env_alone_reads_environment_variables(path):
    if room(dotted(path)) in ("env", "testing"):
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            read = node.attr in ("environ", "getenv")
            assert not read or passes_on(path), (
                f"{dotted(path)}:{node.lineno} reads the environment; env.py does that"
            )


def passes_on(path: Path) -> bool:
    """True where the environment is only handed on to child processes."""
    text = path.read_text()
    uses = len(re.findall(r"os\.(?:environ|getenv)", text))
    return uses == len(re.findall(r"dict\(os\.environ|\*\*os\.environ|env=os\.environ", text))


# --- C++ ---

ORDER = (
    "include",
    "common",
    "ptx",
    "layout",
    "pipeline",
    "sync",
    "mma",
    "kernels",
    "schedule",
    "instances",
    "host",
)
APART = {("layout", "pipeline"), ("pipeline", "layout")}
SOURCES = sorted(p for p in CSRC.rglob("*") if p.suffix in (".h", ".cuh", ".cu", ".cc"))


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), flags=re.M)


def folder(include: str) -> str | None:
    """The room of csrc that an include names; None for a system header."""
    first = include.split("/")[0]
    return "include" if first == "megatron_mok" else first if first in ORDER or first == "tests" else None


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.relative_to(CSRC).as_posix())
def test_cpp_includes_point_downward(path):
    here = path.relative_to(CSRC).parts[0]
    for include in includes(path):
        assert not re.match(r"(torch|ATen|c10|pybind11|Python\.h)", include), f"{path}: {include}"
        there = folder(include)
        if there is None:
            assert not (CSRC / include).exists(), f"{include}: give {include.split('/')[0]} a place in ORDER"
            continue
        if here == "tests":
            continue
        assert ORDER.index(there) <= ORDER.index(here), f"{here} includes {include}: {there} is not below it"
        assert (here, there) not in APART


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if p.relative_to(CSRC).parts[0] in ("include", "layout", "tests")],
    ids=lambda p: p.relative_to(CSRC).as_posix(),
)  # fmt: skip
def test_what_decides_addresses_compiles_without_cuda(path):
    """Transitively: layout and the host tests reach no CUDA header."""
    seen, todo = set(), [path]
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        for include in includes(file):
            assert not include.startswith("cuda"), f"{file.relative_to(CSRC)} includes {include}"
            for base in (CSRC, CSRC / "include", file.parent):
                if (base / include).exists():
                    todo.append(base / include)
