"""README and docs: Python blocks run on a CPU, links and names exist, and the worked example works."""

import html
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from quackish.device import launch
from quackish.errors import UnsupportedError
from quackish.gpu import B200, H200

ROOT = Path(__file__).parents[1]
DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *DOCS)
MOST_WORDS = {"all": 1080, "prose": 640}  # of the README; prose is all but code and tables

# A fenced Python block, and the HTML comment before it if there is one: "gpu" (not run here), or "from: FILE".
BLOCK = re.compile(r"(?:^<!-- (?P<mark>[^\n]*?) -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
needs_compiler = pytest.mark.skipif(sys.platform != "linux", reason="the compiler is for Linux")


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
        hidden=hidden, head=head, target=target, model=model, self=model,
    )  # fmt: skip


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in text_of(page)])
def test_python_blocks_run(page, tmp_path, monkeypatch):
    """All blocks of a page in order, in one namespace and an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quackish.device.kernel_device._uses_kernels", True)  # restored after the test
    if page == "docs/adding_a_kernel.md" and sys.platform != "linux":
        pytest.skip("the compiler is for Linux")
    space: dict = {}
    for mark, code, line in blocks(page):
        if mark == "gpu":
            continue
        if mark is not None and mark.startswith("from: "):
            file = ROOT / "docs" / mark.removeprefix("from: ")
            assert code.strip() in file.read_text(encoding="utf-8"), f"{page}:{line}: not as in {file}"
            space.update(vars(example(file.stem)))
            continue
        # pad with empty lines, so that tracebacks have the page's line numbers
        exec(compile("\n" * (line - 1) + code, str(ROOT / page), "exec"), space)


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


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_reference(dtype):
    softmax = example("softmax")
    x = (10 * torch.randn(5, 300, generator=torch.Generator().manual_seed(0))).to(dtype)
    x[0, :3] = -torch.inf
    x[1] += 1000.0
    got, truth = softmax.softmax(x), torch.softmax(x.double(), -1)
    assert got.dtype == dtype
    # rounding to dtype, and a few roundings in fp32 before it; PyTorch's own error differs from CPU to CPU
    bound = torch.finfo(dtype).eps / 2 + 4 * torch.finfo(torch.float32).eps
    assert (got.double() - truth).abs().max() <= bound
    assert softmax.softmax(x[:0]).shape == (0, 300)


@needs_compiler
@pytest.mark.parametrize("n, dtype, gpu", [(2048, "bfloat16", H200), (1001, "float32", B200)])
def test_softmax_compiles(n, dtype, gpu):
    softmax = example("softmax")
    problem = softmax.SoftmaxProblem(n, dtype)
    used = launch.resources(softmax.SoftmaxFwd, problem, softmax.softmax_config(problem, gpu), gpu.target)
    assert used.stack_bytes == used.local_loads == used.local_stores == 0, used


@needs_compiler
def test_softmax_refuses_long_rows():
    softmax = example("softmax")
    with pytest.raises(UnsupportedError, match="2049 elements; at most 2048"):
        softmax.softmax_config(softmax.SoftmaxProblem(2049, "float32"), H200)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m, n", [(1, 1), (7, 8), (130, 1000), (5, 1001), (64, 2048)])
def test_softmax_on_a_gpu(m, n, dtype):
    softmax = example("softmax")
    x = (10 * torch.randn(m, n, device="cuda")).to(dtype)
    got, truth = softmax.softmax(x), torch.softmax(x.double(), -1)
    error = (got.double() - truth).abs().max()
    assert error <= 2 * (torch.softmax(x, -1).double() - truth).abs().max() + 1e-7
    assert torch.equal(got[m // 2], softmax.softmax(x[m // 2 :])[0])  # a row's bits do not depend on M
