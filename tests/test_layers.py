"""Who imports whom (CONTRIBUTING.md), and that `import quackish` starts neither CUDA nor the compiler."""

import ast
import contextlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quackish.ops import OPERATIONS

PACKAGE = Path(__file__).parents[1] / "quackish"
TOOLS = ("quackish.bench", "quackish.cli", "quackish.tune")
FOR_TOOLS = {"tools.py", "measure.py", "providers.py", "tuning.py", "dry_run.py"}  # of an operation
PUBLIC = {"__init__.py", "parallel.py"}  # may name operations' modules


def imports(path: Path) -> set[str]:
    """The dotted names of all imports, also in functions; `from a import b` is a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports in quackish are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def breaches(path: Path) -> set[str]:
    """What the file imports or names but must not."""
    place = path.relative_to(PACKAGE).parts
    own = place[1] if place[0] == "ops" and place[1] in OPERATIONS else None
    names = imports(path) | {
        f"quackish.ops.{operation}" for operation in re.findall(r"\bquackish[./]ops[./](\w+)", path.read_text("utf-8"))
    }
    forbidden = set()
    if path.name not in PUBLIC or len(place) > 1:
        forbidden |= {f"quackish.ops.{operation}" for operation in OPERATIONS if operation != own}
    if place[0] not in ("__main__.py", "bench", "cli", "tune") and not (own and path.name in FOR_TOOLS):
        forbidden |= set(TOOLS)
    if "kernels" in place:
        forbidden |= {"torch", "__future__.annotations"}  # the DSL evaluates annotations
    if place[0] in ("device", "kernels"):
        forbidden |= {"quackish.emulation", "quackish.integrations", "quackish.profiling", "quackish.testing"}
    if place[0] == "emulator":
        names = {name for name in names if not name.startswith("quackish.emulator")}
        forbidden = {"quackish"}
    return {module for module in forbidden for name in names if f"{name}.".startswith(f"{module}.")}


def test_imports_follow_the_rules():
    found = {str(path.relative_to(PACKAGE)): breaches(path) for path in sorted(PACKAGE.rglob("*.py"))}
    assert not {path: modules for path, modules in found.items() if modules}


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


def test_problems_need_neither_torch_nor_the_dsl_and_kernels_no_torch():
    """Also through what they import."""
    kernels = [path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")]
    modules = sorted(".".join(path.parts) for path in kernels if "kernels" in path.parts and path.name != "__init__")
    run(f"""
import importlib
import sys
compiler = dict.fromkeys(("cuda", "cutlass", "triton", "tvm_ffi"))
sys.modules |= {{"torch": None, **compiler}}
from quackish import configs, ops
assert len(ops.specs()) >= len(ops.OPERATIONS)
assert configs.GemmConfig
if importlib.util.find_spec("nvidia_cutlass_dsl"):
    for name in compiler:
        del sys.modules[name]
    for name in {modules}:
        importlib.import_module(name)
""")


def test_import_starts_neither_torch_nor_cuda_nor_the_compiler():
    run("""
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
from quackish.device import toolchain
if importlib.util.find_spec("cutlass"):
    toolchain.find()
slow = {"cutlass", "cuda", "tvm_ffi", "triton"}
loaded = {name for name in set(sys.modules) - before if name.partition(".")[0] in slow}
assert not loaded, f"quackish loaded {sorted(loaded)}"
assert not torch.cuda.is_initialized(), "quackish initialised CUDA"
""")


PROGRAMS = sorted(
    path for name in ("tests", "scripts", "benchmarks") for path in PACKAGE.parent.glob(f"{name}/**/*.py")
)


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
