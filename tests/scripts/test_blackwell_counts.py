"""scripts/blackwell_counts.py: paths through SASS, the model of times, and the tables of docs/blackwell.md."""

import functools
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from quackish.device.choose import analytical
from quackish.device.cubin import Instruction
from quackish.gpu import B200, H200, Roofs
from quackish.ops.linear_cross_entropy.gemm_problems import LceGemmProblem, Softmax

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def counts():
    sys.path.insert(0, str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location("blackwell_counts", ROOT / "scripts/blackwell_counts.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.pop(0)
    yield module
    del sys.modules[spec.name]


def assembled(text):
    return [Instruction(16 * i, line.strip()) for i, line in enumerate(text.strip().splitlines())]


LOOP = """
    S2R R0, SR_TID.X
    @!P0 BRA 0xc0
    MOV R1, R2
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0
    @!P0 BRA 0xd0
    LDTM.x32 R4, tmem[UR26]
    BRA.U UP0, 0x90
    FADD R1, R1, R1
    FADD R2, R2, R2
    LDTM.x32 R36, tmem[UR26+0x20]
    MUFU.EX2 R1, R1
    @P1 BRA 0x20
    EXIT
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R0
    @!P0 BRA 0xd0
    BRA 0x50
"""


def lines_of(text):
    return [line.strip() for line in text.strip().splitlines()]


def test_paths_through_the_loop_over_tiles(counts):
    paths = counts.epilogue_paths(assembled(LOOP), 64)
    assert paths.passes == 1
    assert paths.shortest == lines_of(LOOP)[2:7] + lines_of(LOOP)[9:12]
    assert paths.longest == lines_of(LOOP)[2:12]
    skipped = counts.epilogue_paths(assembled(LOOP.replace("BRA.U UP0, 0x90", "BRA 0x90")), 64)
    assert (
        skipped.longest == skipped.shortest == [text.replace("BRA.U UP0, 0x90", "BRA 0x90") for text in paths.shortest]
    )


PIECES = """
    S2R R0, SR_TID.X
    MOV R1, R2
    @P2 BRA 0x90
    LDTM.x32 R4, tmem[UR26]
    @P3 BRA 0x70
    FADD R1, R1, R1
    FADD R2, R2, R2
    MUFU.EX2 R1, R1
    @P0 BRA 0x30
    @P3 BRA 0xb0
    FADD R3, R3, R3
    @P1 BRA 0x10
    EXIT
"""


def test_each_pass_of_the_loop_over_pieces_counts(counts):
    lines = lines_of(PIECES)
    paths = counts.epilogue_paths(assembled(PIECES), 128)
    assert paths.passes == 4
    assert sorted(paths.shortest) == sorted([*lines[1:3], *4 * [lines[3], lines[4], *lines[7:9]], lines[9], lines[11]])
    assert sorted(paths.longest) == sorted([*lines[1:3], *4 * lines[3:9], *lines[9:12]])
    with pytest.raises(ValueError, match="do not divide 80 columns"):
        counts.epilogue_paths(assembled(PIECES), 80)


def test_tiles_and_waves(counts):
    softmax = LceGemmProblem(Softmax(), "bfloat16", None)
    sizes = dict(m=300, n=1000, k=100)
    tile = counts.tiling(analytical(softmax, B200).config, sizes, B200)
    assert tile == (128, 256, 2 * 4, 74, 2)
    assert tile.tile_flops == 2 * 128 * 256 * 128
    tile = counts.tiling(analytical(softmax, H200).config, sizes, H200)
    assert tile == (128, 192, 2 * 6, 66, 2)


def test_predicted_times_grow_with_work_and_shrink_with_the_rate(counts):
    small, large = (counts.steps_of(f"linear_cross_entropy {m}x4096x128256", B200) for m in (4096, 8192))
    assert any(step.kernel == "lce_gemm" for step in small.steps)
    slow, fast = (Roofs(7e12, 7e12, clock * 148 * 8192, "a test") for clock in (1e9, 2e9))
    floor = 6 * 8192 * 4096 * 128_256 / slow.gemm
    assert floor < counts.seconds(large, B200, slow) < 1.05 * floor
    assert 1.9 < counts.seconds(large, B200, slow) / counts.seconds(small, B200, slow) < 2.0
    assert counts.seconds(large, B200, fast) < 0.55 * counts.seconds(large, B200, slow)


def test_clocks_are_those_of_published_times(counts):
    """QuACK's linear cross entropy, and a GEMM of cuBLAS."""
    of_quack = 6 * 8192 * 4096 * 128_256 / 17.26e-3
    of_cublas = 2 * 128_256 * 4096 * 2048 / 1.336e-3
    assert counts.clock(B200, counts.SLOWEST) == pytest.approx(of_quack / (148 * 8192), rel=1e-3)
    assert counts.clock(B200, counts.FASTEST) == pytest.approx(of_cublas / (148 * 8192), rel=1e-3)


def test_published_times_beside_the_interval(counts):
    """A GEMM over 2048 rows has 501 x 16 tiles for 74 clusters. cuBLAS's time for it defines the clock."""
    (row,) = (row for row in counts.published_rows() if row[0] == "dW over 2048 rows")
    low, high = (2 * 109 * 74 * 256 * 256 * 2048 / roofs.gemm + 2e-6 for roofs in (counts.FASTEST, counts.SLOWEST))
    assert row[1:3] == [f"{1e3 * low:.2f}", f"{1e3 * high:.2f}"]
    middle = 1e3 * (low + high) / 2
    assert row[3:] == ["", f"1.349, {middle / 1.349:.2f} in", f"1.336, {middle / 1.336:.2f} out"]


def test_gemms_of_experts_have_the_flops_of_all_rows(counts):
    flops = sum(2 * m * n * k for m, n, k in counts.expert_gemms(16_384, 4096, 14_336, 8))
    assert flops == 18 * 16_384 * 4096 * 14_336


def test_the_model_is_near_what_the_h200_measured(counts):
    ratios = counts.hopper_ratios()
    assert len(ratios["linear_cross_entropy"]) >= 6
    for op in ("linear_cross_entropy", "mlp", "linear_divergence"):
        assert 0.95 < min(ratios[op]) <= max(ratios[op]) < 1.06, op  # cards of one kind differ by 2 %
    assert 0.8 < min(ratios["rotary"]) <= max(ratios["rotary"]) < 0.9


def test_tables_without_compiled_numbers_are_up_to_date(counts):
    page = counts.PAGE.read_text(encoding="utf-8")
    tables = {name: counts.TABLES[name] for name in ("predictions", "published", "hopper")}
    with_tables = functools.partial(counts.page_tables.with_tables, tables=tables, script="blackwell_counts.py")
    assert with_tables(page) == page, "run scripts/blackwell_counts.py"
    assert with_tables(page.replace("| 16.3 |", "| 16.4 |")) == page


@pytest.mark.exhaustive
def test_the_table_of_epilogues_is_up_to_date(counts, monkeypatch):
    """Within 10 %: versions of the compiler differ a little. One row of each epilogue is compiled."""
    page = counts.PAGE.read_text(encoding="utf-8")
    table = re.search(r"<!-- begin epilogues: .*? -->\n(.*?)\n<!-- end epilogues -->", page, re.DOTALL)[1]
    kept = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert [row[0] for row in kept[2:]] == [one.title for one in counts.EPILOGUES]
    compiled = {(type(one.problem), type(one.problem.epilogue)): one for one in counts.EPILOGUES}.values()
    monkeypatch.setattr(counts, "EPILOGUES", compiled)
    made = list(counts.epilogue_rows())
    assert made[0] == kept[0]
    before_by_title = {row[0]: row for row in kept[2:]}
    for row in made[1:]:
        before = before_by_title[row[0]]
        for title, now, then in zip(made[0][1:], row[1:], before[1:], strict=True):
            now, then = (int(number.replace(",", "")) for number in (now, then))
            assert abs(now - then) <= 0.1 * then, (row[0], title, "run scripts/blackwell_counts.py")
