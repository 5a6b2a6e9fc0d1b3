"""The allowed imports between layers, and that `import quackish` starts neither CUDA nor the compiler."""

import ast
import contextlib
import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "quackish"


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a layer may import besides itself and the standard library; `lazy` only in functions and for types."""

    quackish: str = ""
    outside: str = ""
    lazy: str = ""


# "kernels" allows quackish.kernels (find()), not the modules in it.
LAYERS = {
    "_version": Layer(),
    "errors": Layer(),
    "variables": Layer(quackish="errors"),
    "files": Layer(),
    "once": Layer(),
    "console": Layer(),
    "argument_types": Layer(quackish="errors"),
    "types": Layer(outside="torch"),
    "gpu": Layer(quackish="errors", lazy="torch"),
    "emulator": Layer(outside="numpy torch pytest", lazy="tvm_ffi cutlass cuda"),  # pytest: for its plugin
    "toolchain": Layer(quackish="_version errors"),
    "configs": Layer(quackish="errors files gpu toolchain variables", lazy="platformdirs"),
    "reference": Layer(outside="torch"),
    "kernels": Layer(quackish="errors gpu configs once", outside="cutlass cuda"),
    "launch": Layer(
        quackish="_version errors variables files gpu toolchain configs",
        outside="torch platformdirs",
        lazy="cutlass cuda tvm_ffi",
    ),
    "ops": Layer(
        quackish="errors gpu once toolchain configs reference launch kernels types",
        outside="torch typing_extensions",
    ),
    "testing": Layer(
        quackish="errors gpu configs reference launch kernels ops", outside="torch", lazy="cutlass tvm_ffi triton"
    ),
    "integrations": Layer(
        quackish="errors once parallel types", outside="megatron torch torchtitan transformers trl typing_extensions"
    ),
    "emulation": Layer(quackish="errors gpu launch once ops", outside="torch", lazy="emulator"),
    "work": Layer(quackish="errors gpu configs kernels"),
    "profiling": Layer(quackish="console errors gpu configs kernels launch work", outside="torch"),
    "operations": Layer(quackish="argument_types errors ops reference testing types work", outside="torch"),
    "tune": Layer(quackish="errors gpu configs reference launch kernels ops testing work", outside="torch"),
    "bench": Layer(
        quackish="_version console errors gpu configs interrupt reference launch kernels ops testing work profiling "
        "operations",
        outside="torch",
        lazy="matplotlib cutlass tvm_ffi triton quack liger_kernel cut_cross_entropy flash_attn transformers",
    ),
    "cli": Layer(
        quackish="_version errors variables files gpu configs reference launch kernels ops testing work profiling "
        "bench tune toolchain types operations emulation argument_types console",
        outside="torch platformdirs",
        lazy="matplotlib cutlass tvm_ffi triton emulator",
    ),
    "parallel": Layer(quackish="errors configs reference ops types", outside="torch typing_extensions"),
    "interrupt": Layer(),
    "__init__": Layer(
        quackish="_version",
        lazy="configs emulation emulator errors integrations ops parallel profiling testing types",
    ),
    "__main__": Layer(quackish="cli console errors interrupt"),
}


def imports(path: Path) -> list[tuple[str, bool]]:
    """(dotted name, whether it runs when the module is imported) of each import; `from a import b` is a.b."""
    names = []

    def visit(node: ast.AST, on_import: bool) -> None:
        if isinstance(node, ast.Import):
            names.extend((alias.name, on_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports in quackish are absolute"
            names.extend((f"{node.module}.{alias.name}", on_import) for alias in node.names)
        on_import = on_import and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        on_import = on_import and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            visit(child, on_import)

    visit(ast.parse(path.read_text(encoding="utf-8")), True)
    return names


def is_module(parts: list[str]) -> bool:
    path = PACKAGE.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()


def violations(path: Path) -> list[str]:
    """The illegal imports of `path`, as sentences."""
    module = path.relative_to(PACKAGE).with_suffix("").parts
    layer = LAYERS[module[0]]
    layers, outside, lazy = layer.quackish.split(), layer.outside.split(), layer.lazy.split()
    wrong = []
    for name, on_import in imports(path):
        top, *rest = name.split(".")
        if top != "quackish":
            allowed = top in sys.stdlib_module_names or top in outside or (top in lazy and not on_import)
        elif module[0] == "kernels" and rest[:1] == ["kernels"]:
            # Kernels share code only through kernels/common. The table imports classes by name.
            allowed = rest[1:2] == ["common"]
        elif rest[:1] == ["kernels"]:
            allowed = "kernels" in layers and (len(rest) == 1 or not is_module(rest[:2]))
        else:
            allowed = not rest or rest[0] == module[0] or rest[0] in layers or not is_module(rest[:1])
            allowed = allowed or (rest[0] in lazy and not on_import)
        if not allowed:
            when = "on import" if top in lazy else "at all"
            wrong.append(f"{'/'.join(module)} may not import {name} {when}")
    if module[0] == "kernels" and ("__future__.annotations", True) in imports(path):
        wrong.append(f"{'/'.join(module)}: the DSL evaluates annotations, so no `from __future__ import annotations`")
    return wrong


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(PACKAGE)) for p in FILES])
def test_imports_follow_the_layers(path):
    assert violations(path) == []


def test_import_starts_neither_torch_nor_cuda_nor_the_compiler():
    code = """
import importlib.util
import sys
import quackish
public = dir(quackish)
assert "torch" not in sys.modules, "import quackish loaded torch"
import torch
before = set(sys.modules)
for name in public:
    getattr(quackish, name)
assert public == dir(quackish)
assert quackish.rms_norm is sys.modules["quackish.ops.rms_norm.api"].rms_norm
from quackish import toolchain
if importlib.util.find_spec("cutlass"):
    toolchain.find()
slow = {"cutlass", "cuda", "tvm_ffi", "triton"}
loaded = {name for name in set(sys.modules) - before if name.partition(".")[0] in slow}
assert not loaded, f"quackish loaded {sorted(loaded)}"
assert not torch.cuda.is_initialized(), "quackish initialised CUDA"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


PROGRAMS = sorted(path for name in ("tests", "scripts", "benchmarks") for path in PACKAGE.parent.glob(f"{name}/*.py"))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_what_programs_import_from_the_package_exists(path):
    """Also for programs that run only on a GPU."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "quackish":
            needs_others = node.module.startswith("quackish.integrations")  # such as TRL, which may be missing
            with contextlib.suppress(*[ModuleNotFoundError] * needs_others):
                module = importlib.import_module(node.module)
                for name in (alias.name for alias in node.names):
                    assert hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}"), (
                        f"{node.module}: {name}"
                    )
