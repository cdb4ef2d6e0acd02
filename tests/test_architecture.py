"""What a lower layer imports, a higher one does not import back."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "torchshard"

LAYERS = [
    ["errors", "layouts", "files", "autocast", "with_value", "stepwise"],
    ["whole"],
    ["recurrent"],
    ["comparing"],
    ["notation", "conversions"],
    ["rules"],
    ["distributed"],
    ["graph"],
    ["capture"],
    ["planner"],
    ["passes", "materialize"],
    ["memory"],
    ["planning"],
    ["program", "lockstep"],
    ["explaining", "agreement", "measure"],
    ["slice_values", "history"],
    ["slices"],
    ["parameter"],
    ["scope", "optimizers"],
    ["state"],
    ["rounding"],
    ["steps"],
    ["checking", "module", "nn"],
    ["drawing", "api", "training", "check_processes"],
    ["public"],
    ["sources"],
    ["cli", "__main__"],
]
"""From the bottom up; a module may import from its own layer and those below it."""

FORBIDDEN = {
    "layouts": ["torch.distributed", "torch.fx"],
    "notation": ["torch.distributed", "torch.fx", "torch"],
    "conversions": ["torch.distributed", "torch.fx", "torch"],
    "rules": ["torch.distributed", "torch.fx"],
    "planner": ["torch.distributed"],
    "passes": ["torch.distributed"],
    "checking": ["torch.distributed"],
    "lockstep": ["torch.distributed"],
}
"""Rules see no graph and no process group, the planner no process group."""
EXEMPT = {"exchange.py"}
"""It makes the objects of torch.distributed that a user asks for."""


def _level(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def _files() -> list[tuple[str, Path]]:
    found = [(path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path) for path in PACKAGE.rglob("*.py")]
    return [(name, path) for name, path in found if name != "__init__"]


def _imports(path: Path) -> list[str]:
    """Modules imported at run time, as dotted names."""
    tree = ast.parse(path.read_text())
    skipped = {id(n) for node in ast.walk(tree) if _is_type_checking(node) for n in ast.walk(node)}
    names: list[str] = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("name, path", _files(), ids=lambda v: v.name if isinstance(v, Path) else "")
def test_layers(name: str, path: Path) -> None:
    imported = _imports(path)
    ours = {m.split(".")[1] for m in imported if m.startswith("torchshard.") and (PACKAGE / m.split(".")[1]).exists()}
    ours |= {
        m.split(".")[1]
        for m in imported
        if m.startswith("torchshard.") and (PACKAGE / f"{m.split('.')[1]}.py").exists()
    }
    above = sorted(m for m in ours if _level(m) > _level(name))
    assert not above, f"{path.name} is in layer {_level(name)} and imports {above}"
    for forbidden in FORBIDDEN.get(name, ()) if path.name not in EXEMPT else ():
        hits = [m for m in imported if m == forbidden or (forbidden != "torch" and m.startswith(f"{forbidden}."))]
        assert not hits, f"{path.name} imports {hits}"


def test_importing_makes_no_process_group_and_prints_nothing() -> None:
    code = "import torchshard, torch.distributed as d; assert not d.is_initialized()"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout + done.stderr, done.stderr
