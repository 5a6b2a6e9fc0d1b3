"""README and docs: Python blocks run on a CPU, links and names exist, and the worked example is an operation."""

import html
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

ROOT = Path(__file__).parents[1]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS)
WORKED_EXAMPLE = "docs/adding_an_operation.md"
MOST_WORDS = {"all": 1080, "prose": 640}  # of the README; prose is all but code and tables

# A fenced Python block, and the HTML comment before it if there is one: "gpu" (not run here), "from: FILE", or
# "beside: FILE" (a module that it imports).
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[tuple[str | None, str, int]]:
    """(mark, code, line) of each Python block."""
    text = text_of(page)
    found = [(m["mark"], m["code"], text.count("\n", 0, m.start("code")) + 1) for m in BLOCK.finditer(text)]
    assert len(found) == text.count("```python"), f"{page}: a Python block that is not fenced as expected"
    return found


def example(name: str) -> types.ModuleType:
    """A file of docs/examples, imported once."""
    module = sys.modules.get(f"docs_{name}")
    if module is None:
        spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / f"docs/examples/{name}.py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def names() -> dict:
    """The variables that the lines of the README's table use: small tensors of a model."""
    import quackish

    m, h, v = 12, 64, 100
    head = torch.nn.Linear(h, v, bias=False)
    hidden = torch.randn(m, h, requires_grad=True)
    target = torch.randint(v, (m,))
    head.weight.main_grad = torch.zeros(v, h)
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=v, hidden_size=h, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return dict(
        torch=torch, F=F, quackish=quackish, x=torch.randn(m, h), res=torch.randn(m, h), weight=torch.ones(h),
        hidden=hidden, head=head, target=target, model=model, self=model, teacher_hidden=torch.randn(m, 2 * h),
        teacher_head=torch.nn.Linear(2 * h, v, bias=False).requires_grad_(False),
    )  # fmt: skip


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in text_of(page) and page != WORKED_EXAMPLE])
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """Each block alone, as if pasted: in a namespace of its own and an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quackish.device.kernel_device._uses_kernels", True)  # restored after the test
    for mark, code, line in blocks(page):
        if mark == "gpu":
            continue
        if mark is not None and mark.startswith("from: "):
            excerpted(page, mark, code, line)
            continue
        if mark is not None:
            stem = Path(mark.removeprefix("beside: ")).stem
            monkeypatch.setitem(sys.modules, stem, example(stem))
        # pad with empty lines, so that tracebacks have the page's line numbers
        exec(compile("\n" * (line - 1) + code, str(ROOT / page), "exec"), {})
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def excerpted(page: str, mark: str, code: str, line: int) -> Path:
    """The file of an excerpt, which has the same lines."""
    file = ROOT / "docs" / mark.removeprefix("from: ")
    assert code.strip("\n") in file.read_text(encoding="utf-8"), f"{page}:{line}: not as in {file}"
    return file


def test_few_blocks_need_a_gpu():
    assert sum(mark == "gpu" for page in PAGES for mark, _, _ in blocks(page)) <= 3


def test_readme_lines_for_frameworks():
    """Runs the second column of the README's table with placeholders for the frameworks' objects."""
    table = text_of("README.md").split("## Your framework, one line")[1].split("\n## ")[0]
    lines = [re.match(r"\| .* \| `([^`|]*)` \|$", row) for row in table.splitlines()]
    codes = [line[1] for line in lines if line and "quackish." in line[1]]
    assert len(codes) >= 6
    space = names()
    for code in codes:
        if "integrations.trl" not in code or importlib.util.find_spec("trl"):
            exec(compile(code, "README.md", "exec"), space)
    assert space["head"].weight.main_grad.abs().sum() == 0  # only backward adds to it
    space["loss_of_megatron"].backward()
    assert space["head"].weight.main_grad.abs().sum() > 0
    assert space["model"](torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).logits is None


def test_readme_example_gives_what_pytorch_does(capsys):
    """The first block, pasted as it is. Truth: PyTorch in fp64 on the same tensors, with residual as it was before."""
    code = blocks("README.md")[0][1]
    before, call = code.split("hidden, residual = ")
    space: dict = {}
    exec(before, space)
    truth = {name: space[name].detach().double() for name in ("x", "residual", "norm")}
    exec("hidden, residual = " + call, space)
    capsys.readouterr()
    norm, head = truth["norm"].requires_grad_(), space["head"].weight.detach().double().requires_grad_()
    hidden = F.rms_norm(truth["x"] + truth["residual"], (512,), norm, 1e-6)
    loss = F.cross_entropy(F.linear(hidden, head).flatten(0, 1), space["target"].flatten())
    loss.backward()
    for ours, theirs in [
        (space["hidden"], hidden), (space["loss"], loss), (space["norm"].grad, norm.grad),
        (space["head"].weight.grad, head.grad),
    ]:  # fmt: skip
        assert (ours.double() - theirs).norm() <= 0.01 * theirs.norm()


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_names_exist(page):
    """Links, anchors, `paths`, and functions as in: `one` and `two` in [`path`](...)."""
    text, here = text_of(page), ROOT / page
    missing = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", text):
        file = here.parent / target if target else here
        if "://" not in target and not (file.exists() and (not anchor or anchor in anchors(file))):
            missing.append(f"{target}#{anchor}")
    named = re.findall(r"`((?:quackish|tests|docs|scripts|benchmarks)/[\w./]*)`", text)
    missing += [path for path in named if not (ROOT / path).exists()]
    for one, two, path in re.findall(r"`(\w+)`(?: and `(\w+)`)? in \[`([\w./]+\.py)`\]", text):
        defined = re.findall(r"^(?:def|class) (\w+)", text_of(path), re.MULTILINE)
        missing += [f"{path}: {name}" for name in (one, two) if name and name not in defined]
    assert missing == []


def test_the_site_has_every_page():
    listed = re.findall(r": ([\w/]+\.md)$", text_of("mkdocs.yml").split("\nnav:\n")[1], re.MULTILINE)
    assert sorted(f"docs/{page}" for page in listed) == DOCS


@pytest.mark.parametrize("module", ["quackish", "quackish.parallel", "quackish.testing", "quackish.emulator"])
def test_the_reference_has_every_public_name(module):
    listed = [name for page in DOCS for name in re.findall(r"^::: ([\w.]+)$", text_of(page), re.MULTILINE)]
    assert len(listed) == len(set(listed))
    public = [getattr(importlib.import_module(module), name) for name in importlib.import_module(module).__all__]
    places = [name.rpartition(".") for name in listed if not name.startswith("quackish.integrations.")]
    documented = [getattr(importlib.import_module(place), name) for place, _, name in places]
    assert [each for each in public if isinstance(each, type | types.FunctionType) and each not in documented] == []


def test_readme_is_short_and_has_the_commands():
    text = text_of("README.md")
    prose = re.sub(r"^\|.*$", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    for what, most in MOST_WORDS.items():
        words = {"all": text, "prose": prose}[what].split()
        assert sum(any(map(str.isalnum, word)) for word in words) <= most, what
    assert "\npip install -e . " in text
    setup = "python3 -m venv .venv && . .venv/bin/activate && pip install -e"
    assert f"```bash\n{setup} '.[bench]' && python scripts/train_lm.py\n```" in text
    assert f"<!-- ci: test -->\n```bash\n{setup} '.[dev]' && scripts/check.sh\n```" in text  # as .ci/run looks for it


def test_buffer_figure_is_up_to_date(tmp_path):
    space = {"__name__": "draw_buffers", "__file__": str(ROOT / "docs/internals/draw_buffers.py")}
    exec(text_of("docs/internals/draw_buffers.py"), space)
    drawn = text_of("docs/internals/linear_cross_entropy_buffers.svg")
    for panel in (space["chunked"](), space["stored"](), space["recompute"]()):
        assert panel.title in drawn
        assert all(b.label in drawn for b in panel.buffers)


def test_drawings_of_calls_are_up_to_date():
    space = {"__name__": "draw_calls", "__file__": str(ROOT / "docs/internals/draw_calls.py")}
    exec(text_of("docs/internals/draw_calls.py"), space)
    for name, make in space["DRAWINGS"].items():
        drawn, drawing = html.unescape(text_of(f"docs/internals/{name}.svg")), make()
        for text in (*(box.text for box in drawing.boxes.values()), *drawing.notes, *drawing.legend):
            assert all(line in drawn for line in text.split("\n")), text


# The worked example -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_softmax(tmp_path_factory):
    """A copy of the package and its tests with one more operation: its folder, its tests, its name in OPERATIONS."""
    if sys.platform != "linux":
        pytest.skip("the compiler is for Linux")
    copy, examples = tmp_path_factory.mktemp("with_softmax"), ROOT / "docs/examples"
    for folder in ("quackish", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    shutil.copytree(examples / "softmax", copy / "quackish/ops/softmax", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests/softmax").mkdir()
    (copy / "tests/softmax/__init__.py").touch()
    shutil.copy(examples / "test_softmax.py", copy / "tests/softmax")
    operations = copy / "quackish/ops/__init__.py"
    before = operations.read_text(encoding="utf-8")
    (added,) = re.findall(r'^OPERATIONS = \(\.\.\., ("\w+")\)$', text_of(WORKED_EXAMPLE), re.MULTILINE)
    after, count = re.subn(r"^(OPERATIONS = \([^)]*?),?\s*\)$", rf"\1, {added})", before, flags=re.MULTILINE)
    assert count == 1
    operations.write_text(after, encoding="utf-8")
    (ROOT / "out").mkdir(exist_ok=True)
    (copy / "out").symlink_to(ROOT / "out")  # has the tests' compiled kernels
    return copy


def run_in(copy: Path, *arguments: str) -> str:
    """The output of a Python process that imports the copy."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["PYTHONPATH"] = str(copy)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
def test_the_examples_tests_pass(with_softmax):
    """Its own, and those that walk over all operations."""
    walk = "tests/test_operations.py", "tests/device/test_work.py", "tests/test_layers.py"
    run_in(
        with_softmax, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "softmax or rules", "tests/softmax", *walk
    )


# Runs blocks and commands of the page, then looks at the lists of the other commands.
_RUN_PAGE = """
import sys
from quackish.__main__ import main
from quackish.bench.table import BENCHES
from quackish.cli import check, precompile

exec(compile(open("blocks.py").read(), "adding_an_operation.md", "exec"), {})
for command in open("commands"):
    assert main(command.split()[1:]) == 0, command
assert "softmax" in BENCHES
assert [name for name in check.SELF_TESTS if name.startswith("softmax")] == ["softmax", "softmax, rows not aligned"]
assert len(precompile.requests_of("softmax", "64x1000", "h200")) == 2
"""


def test_the_examples_page_runs(with_softmax):
    """Its blocks, which emulate both directions for Hopper and Blackwell, and its commands that compile little."""
    lines: list[str] = []
    for mark, code, line in blocks(WORKED_EXAMPLE):
        if mark is None:
            lines += [""] * (line - 1 - len(lines)) + code.splitlines()  # the page's line numbers
        else:
            excerpted(WORKED_EXAMPLE, mark, code, line)
    commands = re.findall(r"^quackish (?:explain|emulate) .*$", text_of(WORKED_EXAMPLE), re.MULTILINE)
    assert len(commands) == 2
    (with_softmax / "blocks.py").write_text("\n".join(lines), encoding="utf-8")
    (with_softmax / "commands").write_text("\n".join(commands), encoding="utf-8")
    output = run_in(with_softmax, "-c", _RUN_PAGE)
    assert "[1] softmax_fwd, class SoftmaxFwd: n=1000 dtype=bf16" in output
    assert "[2] softmax_bwd, class SoftmaxBwd: n=1000 dtype=bf16" in output
