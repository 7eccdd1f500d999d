"""The layers of the package: who may import whom, as docs/design.md draws it."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fedcat"

MAY_IMPORT = {
    "core": set(),
    "data": {"core"},
    "models": {"core", "data"},
    "protocol": {"core", "data", "models"},
    "methods": {"core", "data", "models", "protocol"},
    "engines": {"core", "data", "models", "protocol"},
    "config": {"core", "data", "models", "protocol", "methods", "engines"},
    "runs": {"core", "data", "models", "protocol", "methods", "engines", "config"},
    "report": {"core", "data"},
    "bench": {"core", "data", "models", "runs"},
    "paper": {"core", "data", "config", "runs", "report"},
    "api": {"core", "models", "config", "runs"},
}
"""What each part of the package may import besides itself and the version. The command line may import everything."""
TOP = ("__init__", "__main__", "version")


def imported(path: Path) -> set[str]:
    """Return the parts of the package that a module imports."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} imports relatively"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("fedcat.")}
    return parts


def part_of(path: Path) -> str:
    """Return the directory directly below the package that a module lies in, or its own name."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


MODULES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    part = part_of(path)
    if part in TOP:
        return
    found = imported(path) - {part, "version"}
    assert "cli" not in found
    if part != "cli":
        assert found <= MAY_IMPORT[part]


def test_every_part_has_its_rules():
    parts = {part_of(path) for path in MODULES}
    assert parts == {*MAY_IMPORT, *TOP, "cli"}
    assert len([path for path in MODULES if path.parent == SOURCE]) <= 8
