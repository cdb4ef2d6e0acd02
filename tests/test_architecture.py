"""The rooms of the package: each imports only rooms below it, without import cycles."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torchshard"

ROOMS = [
    "__main__", "cli", "testing", "public", "api", "report", "checking", "checkpoints", "nn", "runtime", "compiler",
    "passes", "planner", "plans", "capture", "ir", "weights", "distributed", "rules", "custom_ops", "ops",
    "core",
]  # fmt: skip
"""The rooms from the top down; each imports only rooms below it."""

FORBIDDEN = {
    "core": ["torch.distributed", "torch.fx"],
    "ops": ["torch.distributed"],
    "rules": ["torch.distributed", "torch.fx"],
    "planner": ["torch.distributed"],
    "passes": ["torch.distributed"],
    "compiler": ["torch.distributed"],
    "checking": ["torch.distributed"],
}
"""Rules don't see graphs; only `distributed`, `nn`, `runtime` and the check on processes use a process group."""
EXEMPT = {"checking.processes"}
PURE = {"core.rows", "core.notation", "core.choices", "core.conversions"}
"""Modules that do not import torch at all."""


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"}


def _imported(path: Path) -> Iterator[str]:
    """The dotted names that a module imports, including imports in functions and for type checkers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _ours(path: Path) -> set[str]:
    """The modules of the package that a module imports."""
    names = (name.removeprefix("torchshard.") for name in _imported(path) if name.startswith("torchshard."))
    found = (name if name in MODULES else name.rpartition(".")[0] for name in names)
    return {name for name in found if name in MODULES}


def _room(module: str) -> str:
    return module.partition(".")[0]


def test_every_module_is_in_a_room() -> None:
    assert {_room(module) for module in MODULES} == set(ROOMS)


@pytest.mark.parametrize("module", MODULES)
def test_a_room_imports_only_rooms_below_it(module: str) -> None:
    above = ROOMS[: ROOMS.index(_room(module))]
    assert not [other for other in _ours(MODULES[module]) if _room(other) in above]


WITHOUT_RANKS = ROOMS[ROOMS.index("compiler") :]
"""The rooms that make graphs, apart from those that hold or send values; they need no process group."""


@pytest.mark.parametrize("module", [m for m in MODULES if _room(m) in WITHOUT_RANKS])
def test_making_a_graph_needs_no_ranks(module: str) -> None:
    """Collectives are declared in `ops`; `distributed` registers their kernels."""
    holds_values = _room(module) in ("weights", "distributed")
    assert holds_values or not [other for other in _ours(MODULES[module]) if _room(other) == "distributed"]


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = nx.DiGraph((module, other) for module, path in MODULES.items() for other in _ours(path) - {module})
    assert not [sorted(circle) for circle in nx.strongly_connected_components(graph) if len(circle) > 1]


LONGEST_FILE, LONGEST_FUNCTION = 400, 45
"""In lines. Functions are counted without their docstrings; `ruff` limits their branches (pyproject.toml)."""


def test_files_can_be_read_in_one_sitting() -> None:
    lines = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in [*MODULES.values(), *TESTS]}
    assert not {path: count for path, count in lines.items() if count > LONGEST_FILE}, "split it by subject"


def test_functions_fit_on_a_screen() -> None:
    lines = dict(function for module, path in MODULES.items() for function in _functions(module, path))
    assert not {name: count for name, count in lines.items() if count > LONGEST_FUNCTION}


def _functions(module: str, path: Path) -> Iterator[tuple[str, int]]:
    """The functions of a module, with their lines without docstrings; the longest of those with one name is last."""
    nodes = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    found = ((f"{module}.{node.name}", _lines(node) - _docstring_lines(node)) for node in nodes)
    yield from sorted(found, key=lambda function: function[1])


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _docstring_lines(node: ast.FunctionDef) -> int:
    return _lines(node.body[0]) if ast.get_docstring(node) is not None else 0


OF_ROWS = [m for m in MODULES if m in ("core.notation", "core.rows", "core.choices") or m.startswith("rules.")]
"""Modules about rows, whose letters are factors. `rules.collectives` has rows of ops over another mesh axis."""


@pytest.mark.parametrize("module", OF_ROWS)
def test_a_letter_of_a_row_is_a_factor(module: str) -> None:
    """`Terms` of CONTRIBUTING.md: an axis is a mesh's. A row's context knows the mesh axis that is planned."""
    lines = MODULES[module].read_text().splitlines()
    said = [line for line in lines if re.search(r"\b(axis|axes)\b", line)]
    assert all("coordinate.axis" in line or module == "rules.collectives" for line in said), said


USERS_OBJECTS = {
    "capture.namespaces: owner", "custom_ops.whole: function",
}  # fmt: skip
"""Fields for objects of the user or of PyTorch, which may have any type."""


def test_no_field_hides_a_type_of_a_room_above() -> None:
    """A field of type Any would let a room use types that it must not import."""
    found = set()
    for module, path in MODULES.items():
        classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
        fields = [field for each in classes for field in each.body if isinstance(field, ast.AnnAssign)]
        hidden = [field for field in fields if ast.unparse(field.annotation) in ("Any", "Any | None")]
        found |= {f"{module}: {ast.unparse(field.target)}" for field in hidden}
    assert found == USERS_OBJECTS


@pytest.mark.parametrize("module", MODULES)
def test_rooms_import_no_forbidden_part_of_torch(module: str) -> None:
    forbidden = [] if module in EXEMPT else FORBIDDEN.get(_room(module), [])
    hits = [name for name in _imported(MODULES[module]) if any(f"{name}.".startswith(f"{f}.") for f in forbidden)]
    assert not hits
    assert module not in PURE or not [name for name in _imported(MODULES[module]) if f"{name}.".startswith("torch.")]


def test_importing_makes_no_process_group_and_prints_nothing() -> None:
    code = "import torchshard, torch.distributed as d; assert not d.is_initialized()"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout + done.stderr, done.stderr


def test_tests_named_for_the_night_exist(tmp_path: Path) -> None:
    """`nightly` raises if a pattern matches no case; else a renamed case would leave the nightly run unnoticed."""

    def collected(names: str) -> tuple[list[str], str]:
        file = tmp_path / "test_cases.py"
        file.write_text(CASES.format(names=names))
        command = [
            "-m",
            "pytest",
            "-q",
            "--collect-only",
            "-p",
            "tests.conftest",
            "--rootdir",
            str(tmp_path),
            str(file),
        ]
        done = subprocess.run([sys.executable, *command, "-m", "nightly"], capture_output=True, text=True, cwd=ROOT)
        return re.findall(r"::test_it\[(.*)\]", done.stdout), done.stderr

    assert collected("'a-*', 'c-1'") == (["a-1", "a-2", "c-1"], "")
    assert collected("but=['a-*']") == (["b-1", "c-1"], "")
    assert "('test_cases.py::test_it', 'd')" in collected("'a-*', 'd'")[1]


CASES = """
import pytest
from tests.helpers import nightly

@nightly({names})
@pytest.mark.parametrize("case", ["a-1", "a-2", "b-1", "c-1"])
def test_it(case):
    pass
"""


TESTS = sorted((ROOT / "tests").rglob("*.py"))
DOOR = {"testing", "distributed", "distributed.launch", "nn", "nn.functional"}
"""The public modules that tests import, in addition to `torchshard`; `launch` is also a function."""
INSIDE = {
    "test_capture_parts.py": "known calls, watched code, attributes, sizes",
    "test_check_parts.py": "steps of the check, its measure of rounding",
    "test_checkpoint_files.py": "files of a checkpoint",
    "test_conversions.py": "laws of conversions, shapes of their operators",
    "test_costs.py": "prices, timeline, predictions",
    "test_figures.py": "parts of pictures, texts",
    "test_folders.py": "reading of weights",
    "test_following.py": "slices that are followed",
    "test_gpus.py": "groups as on GPUs",
    "test_kernels.py": "prices of kernels and collectives",
    "test_layouts.py": "laws of layouts and shardings",
    "test_lowering.py": "direct, decompose, lower",
    "test_network.py": "the network of costs",
    "test_notation.py": "notation",
    "test_passes.py": "passes, one after the other",
    "test_planner.py": "elimination",
    "test_planner_models.py": "search",
    "test_repeated.py": "equal layers",
    "test_shared_memory.py": "wire and memory",
    "test_step.py": "graphs of a step",
}
"""Tests that import internal modules -> the algorithm that they test by itself."""


def test_tests_go_through_the_door() -> None:
    inside = {path.name for path in TESTS if _ours(path) - DOOR}
    assert inside == set(INSIDE) and len(INSIDE) <= 20


def test_every_seeded_fault_has_its_place() -> None:
    """Each line that `benchmarks/mutants.py` replaces occurs exactly once in its file."""
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "benchmarks" / "mutants.py")
    assert spec is not None and spec.loader is not None
    mutants = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = mutants  # its dataclass looks up its module there
    spec.loader.exec_module(mutants)
    texts = {fault.file: (ROOT / "torchshard" / fault.file).read_text() for fault in mutants.FAULTS}
    assert len(mutants.FAULTS) >= 30
    assert [fault.name for fault in mutants.FAULTS if texts[fault.file].count(fault.right) != 1] == []


def test_benchmarks_that_import_tests_put_them_on_the_path_first() -> None:
    texts = {path.name: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    importing = {name: text for name, text in texts.items() if "from tests." in text}
    assert importing
    assert [
        name for name, text in importing.items() if not -1 < text.find("sys.path.insert") < text.find("from tests.")
    ] == []


FACTORIES = {"arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn",
             "randperm", "scalar_tensor", "tensor", "zeros"}  # fmt: skip
BY_DEFAULT = {"distributed.messages: torch.empty(tuple(like), dtype=dtype)"}
"""A tensor that a user requests by shape alone is created on PyTorch's default device."""


@pytest.mark.parametrize("module", MODULES)
def test_the_library_says_where_its_tensors_are(module: str) -> None:
    """Factory calls pass a device, since `torch.set_default_device("cuda")` moves tensors created without one."""
    calls = (node for node in ast.walk(ast.parse(MODULES[module].read_text())) if isinstance(node, ast.Call))
    made = (call for call in calls if ast.unparse(call.func) in {f"torch.{name}" for name in FACTORIES})
    without = {f"{module}: {ast.unparse(call)}" for call in made if all(k.arg != "device" for k in call.keywords)}
    assert without <= BY_DEFAULT
