"""The architecture: which package may import which, and no import cycle between files. Local imports count too."""

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from paths import SOURCE as SRC

BASE = {"errors"}
PLANNER = {"searching", "balancing", "estimating", "planning"}
MAY_IMPORT = {
    "errors": set(),
    "core": BASE | {"numpy", "numba"},  # only inside core/jit.py, to be fast on large inputs
    "schedules": BASE | {"core"},
    "sim": BASE | {"core", "numpy"},
    "viz": BASE | {"core", "numpy", "rich", "matplotlib"},
    "engine": BASE | {"core", "torch", "triton", "numpy", "networkx", "transformers", "safetensors", "peft"},
    "searching": BASE | {"core", "schedules", "sim", "numpy", "ortools"},
    "balancing": BASE | {"core", "schedules", "sim", "numpy", "ortools"},
    "profiling": BASE | {"core", "engine", "torch", "transformers"},
    "estimating": BASE | {"core", "schedules", "sim", "engine", "profiling", "numpy", "torch", "networkx"},
    "planning": BASE | {"core", "schedules", "sim", "searching", "balancing", "estimating", "numpy"},
    "pipelining": BASE | {"core", "schedules", "engine", "torch"},
    "integrations": BASE
    | {
        "core",
        "schedules",
        "engine",
        "pipelining",
        "torch",
        "transformers",
        "accelerate",
        "torchtitan",
        "areal",
        "nemo_automodel",
        "verl",
    },
    "train": BASE
    | {"core", "schedules", "sim", "viz", "engine", *PLANNER, "torch", "numpy", "transformers", "pydantic", "peft"}
    | {"datasets", "rich", "tensorboard", "wandb"},
    "app": BASE | {"core", "schedules", "sim", "viz", *PLANNER, "fastapi", "starlette", "uvicorn", "pydantic"},
    "doctor": BASE | {"core", "torch"},
    "cli": BASE
    | {"core", "schedules", "sim", "viz", *PLANNER, "profiling", "app", "engine", "train", "doctor", "click", "rich"},
    "__main__": {"cli"},
    "__init__": BASE | {"core", "schedules", "sim", "viz", *PLANNER},
}
# packages and modules of the engine, and those of the engine that each may import
ENGINE_MAY_IMPORT = {
    "torch_private": set(),
    "timing": set(),
    "backward": {"torch_private", "transformers_private", "timing"},
    "blocks": {"torch_private", "backward"},
    "layout": set(),
    "fsdp_private": set(),
    "comm": {"torch_private", "layout"},
    "transformers_private": set(),
    "stages": {"torch_private", "transformers_private", "comm"},
    "mesh": {"torch_private", "fsdp_private", "transformers_private", "backward", "blocks", "stages", "layout"},
    "step": {
        "torch_private",
        "fsdp_private",
        "timing",
        "backward",
        "blocks",
        "comm",
        "layout",
        "mesh",
        "options",
        "stages",
    },
    "head": {"torch_private", "backward", "blocks", "mesh", "stages"},
    "float8": {"torch_private", "backward", "blocks", "stages"},
    "low_bits": set(),
    "adam_kernel": set(),
    "adam": {"torch_private", "adam_kernel", "low_bits"},
    "masters": {"torch_private", "adam", "backward", "low_bits"},
    "options": {"blocks"},
    "setup": {"options", "comm", "layout", "mesh", "stages"},
    "checkpoint": {"torch_private", "transformers_private", "backward", "comm", "layout", "masters", "setup", "stages"},
    "engine": {
        "backward",
        "blocks",
        "checkpoint",
        "comm",
        "float8",
        "head",
        "layout",
        "mesh",
        "options",
        "setup",
        "stages",
        "step",
    },
    "run": {"torch_private", "blocks", "comm", "mesh", "stages", "step", "engine"},
}
FILES = sorted(SRC.rglob("*.py"))


@cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """All of a file, also those inside functions."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]


def imported(path: Path) -> set[str]:
    """Top-level names a file imports; `zeropipe.core.action` counts as `core`."""
    names = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path}: write absolute imports"
            names |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "zeropipe" else {node.module}
            )
    parts = [name.split(".") for name in names]
    return {p[1] if p[0] == "zeropipe" and len(p) > 1 else p[0] for p in parts}


def part_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def test_imports_go_one_way():
    everywhere = {"__version__"} | sys.stdlib_module_names
    forbidden = {
        str(path.relative_to(SRC)): found
        for path in FILES
        if (found := imported(path) - MAY_IMPORT[part_of(path)] - {part_of(path)} - everywhere)
    }
    assert forbidden == {}


def test_imports_inside_the_engine_go_one_way():
    engine, forbidden = SRC / "engine", {}
    for path in sorted(engine.rglob("*.py")):
        part = path.relative_to(engine).parts[0].removesuffix(".py")
        if part != "__init__" and (found := engine_imports(path) - ENGINE_MAY_IMPORT[part] - {part}):
            forbidden[str(path.relative_to(engine))] = found
    assert forbidden == {}


def engine_imports(path: Path) -> set[str]:
    """The packages and modules of the engine that a file imports."""
    names = set()
    for node in import_statements(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zeropipe.engine"):
            inside = node.module.split(".")[2:]
            names |= {inside[0]} if inside else {alias.name for alias in node.names}
    return names


def modules_imported(path: Path, known: set[str]) -> set[str]:
    """The modules of zeropipe that a file imports, without the leading "zeropipe."."""
    names = set()
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name.removeprefix("zeropipe.") in known else node.module for name in members}
    return {name.removeprefix("zeropipe.") for name in names} & known


def import_cycles(source: Path) -> set[tuple[str, ...]]:
    """Groups of modules that import each other, directly or through others."""
    paths = {".".join(p.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): p
             for p in source.rglob("*.py")}  # fmt: skip
    imports = {name: modules_imported(path, set(paths)) - {name} for name, path in paths.items()}

    def reachable(name: str) -> set[str]:
        found, left = set(), [name]
        while left:
            new = imports[left.pop()] - found
            found |= new
            left += new
        return found

    reach = {name: reachable(name) for name in paths}
    return {tuple(sorted(m for m in reach[name] if name in reach[m])) for name in paths if name in reach[name]}


def test_no_file_imports_itself_through_others():
    assert import_cycles(SRC) == set()


def test_the_rule_finds_a_cycle(tmp_path):
    for name, text in {
        "a": "from zeropipe.b import x", "b": "def f():\n    import zeropipe.c", "c": "from zeropipe import a",
        "d": "from zeropipe.a import y",
    }.items():  # fmt: skip
        (tmp_path / f"{name}.py").write_text(text)
    assert import_cycles(tmp_path) == {("a", "b", "c")}


def test_the_rule_finds_a_forbidden_import(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("def f():\n    from zeropipe.sim.costs import Costs\n    import torch\n")
    assert imported(bad) == {"sim", "torch"}


def test_the_table_has_no_cycle():
    parts = {part: allowed & MAY_IMPORT.keys() for part, allowed in MAY_IMPORT.items()}
    list(TopologicalSorter(parts).static_order())  # raises CycleError


def test_core_needs_numpy_and_numba_only_in_one_file():
    users = {p.name for p in FILES if part_of(p) == "core" and imported(p) & {"numpy", "numba"}}
    assert users == {"jit.py"}
