"""The rooms and who may import whom (docs/decisions/0001). Parsed, not run: lazy imports count."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "bloomery"
FLOORS = {
    "base": 0,
    "families": 0,
    "config": 1,
    "sizing": 2,
    "model": 3,
    "data": 3,
    "monitor": 3,
    "launch": 4,
    "parallel": 4,
    "checkpoint": 4,
    "interop": 5,
    "prepare": 4,
    "train": 5,
    "plan": 5,
    "verify": 6,
    "cli": 7,
}
NEVER = {
    "model": ("torch.distributed", "torch.cuda", "os"),
    "prepare": ("torch.distributed",),
    "sizing": ("torch", "numpy"),
    "config": ("torch", "numpy"),
    "families": ("torch", "numpy", "bloomery.base"),
    "plan": ("torch",),
}
"""Third-party modules a room must not touch."""


def imports_of(source: str) -> set[str]:
    """Every module a file names, `from a import b` as both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def violations(room: str, source: str) -> list[str]:
    """What a file of this room imports against the rules, with the remedy."""
    wrong = []
    for name in sorted(imports_of(source)):
        parts = name.split(".")
        if parts[0] == "bloomery" and len(parts) > 1 and parts[1] in FLOORS:
            other = parts[1]
            if other != room and FLOORS[other] >= FLOORS[room]:
                wrong.append(
                    f"{room} (floor {FLOORS[room]}) imports {name} (floor {FLOORS[other]}): "
                    "move the shared piece to a lower floor, or pass it as an argument"
                )
        for banned in NEVER.get(room, ()):
            if name == banned or name.startswith(f"{banned}."):
                wrong.append(f"{room} imports {name}, which its room never holds")
    return wrong


def files() -> list[tuple[str, Path]]:
    inside = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE]
    return [(path.relative_to(PACKAGE).parts[0], path) for path in inside]


@pytest.mark.parametrize(("room", "path"), files(), ids=lambda value: getattr(value, "stem", value))
def test_every_file_imports_only_lower_floors(room: str, path: Path) -> None:
    assert not violations(room, path.read_text())


@pytest.mark.parametrize(
    ("room", "planted"),
    [
        ("config", "from bloomery.sizing.schedule import TrainingPlan"),
        ("model", "import torch.distributed as dist"),
        ("model", "from torch import distributed"),
        ("data", "from bloomery.model import transformer"),
        ("train", "def f():\n    from bloomery.plan import rank"),
        ("sizing", "import torch"),
        ("base", "from bloomery.config.recipe import Recipe"),
    ],
)
def test_a_planted_import_is_caught(room: str, planted: str) -> None:
    assert violations(room, planted)


def test_every_room_has_a_floor_and_a_signpost() -> None:
    for folder in PACKAGE.iterdir():
        if folder.is_dir() and folder.name not in ("recipes", "__pycache__"):
            assert folder.name in FLOORS
            signpost = ast.parse((folder / "__init__.py").read_text())
            assert len(signpost.body) == 1, f"{folder.name}/__init__.py is a signpost, not a room"
            assert ast.get_docstring(signpost)


def test_nothing_is_called_utils_and_no_file_is_long() -> None:
    for path in PACKAGE.rglob("*.py"):
        assert "util" not in path.stem, path
        assert len(path.read_text().splitlines()) <= 600, f"{path} is two rooms in one"


def test_no_function_is_long_and_no_folder_crowded() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name} has more than 60 lines"
        assert len(list(path.parent.glob("*.py"))) <= 24, f"{path.parent} has too many files"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Lazy imports count."""
    modules = {".".join(("bloomery", *path.relative_to(PACKAGE).with_suffix("").parts)): path for _, path in files()}
    imported = {name: imports_of(path.read_text()) & modules.keys() for name, path in modules.items()}
    while free := [name for name, needs in imported.items() if not needs & imported.keys()]:
        for name in free:
            del imported[name]
    assert not imported, "each of these imports another one of them"


def test_only_the_accelerator_module_speaks_to_a_device_backend() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.name == "accelerator.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            assert not name.startswith(("torch.cuda", "torch.accelerator", "torch.xpu")), f"{path}: {name}"


def test_a_family_is_named_only_in_its_own_file() -> None:
    """Everything else reads its facts: a new family is one file in families/."""
    from bloomery.families.registry import FAMILIES

    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "families":
            named = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not named & FAMILIES.keys(), f"{path}: read the family's facts instead"


def test_the_loop_fits_a_screen_and_knows_no_ranks() -> None:
    for name in ("loop.py", "step.py"):
        text = (PACKAGE / "train" / name).read_text().lower()
        for word in ("pipeline", "mesh", "world_size", "rank"):
            assert word not in text, f"{name} mentions {word}"
    assert len((PACKAGE / "train" / "loop.py").read_text().splitlines()) <= 50


@pytest.mark.parametrize(
    "module",
    [
        "config.load",
        "sizing.check",
        "monitor.report",
        "cli.main",
        "cli.recipe",
        "cli.plan",
        "cli.launch",
        "cli.watch",
        "cli.import_megatron",
        "interop.megatron.importer",
        "base.storage",
    ],
)
def test_what_a_login_node_needs_imports_without_torch(module: str) -> None:
    code = f"import sys, bloomery.{module}; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_recipe_field_is_read_somewhere() -> None:
    """A field that nothing reads would be silence. The schema and its loader do not count as readers."""
    from bloomery.config.schema import all_paths

    readers = [path.read_text() for path in PACKAGE.rglob("*.py") if path.parent.name != "config"]
    unread = []
    for path in all_paths():
        name = path.rsplit(".", 1)[-1]
        attribute = ".for_" if name == "for" else f".{name}"
        if not any(attribute in text for text in readers):
            unread.append(path)
    assert unread == WAITING, f"these fields are read by nothing: {sorted(set(unread) ^ set(WAITING))}"


WAITING: list[str] = []
"""Fields of the public contract whose commands are not built yet; `train` refuses a recipe that needs them."""
