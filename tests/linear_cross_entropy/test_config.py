"""Config rules of linear cross entropy: schedule, rows per chunk, and buffers that share storage."""

import itertools

import pytest

from quackish.ops.linear_cross_entropy.layout import (
    CHUNK_BYTES,
    COLUMN_MULTIPLE,
    KEPT_BLOCK,
    MAX_CHUNK_BYTES,
    ONE_CHUNK_BYTES,
    STORED_BYTES,
    ClassBlock,
    LinearCrossEntropyProblem,
    choose_layout,
    even_chunks,
    first_classes,
    kernel_config,
    linear_cross_entropy_config,
    recompute_blocks,
    scratch_columns,
    shared_storage,
)
from tests.linear_cross_entropy.cases import SCHEDULES


def test_schedule_rule():
    def schedule(m, reduction="mean", dtype="bfloat16", asked="auto", **kw):
        return kernel_config(LinearCrossEntropyProblem(128_256, 4096, dtype, reduction, **kw), m, asked).schedule

    limit = STORED_BYTES // (2 * 128_256)
    assert {schedule(m, r) for m in (1, 10**6) for r in ("mean", "sum")} == {"chunked"}
    for kw in (dict(reduction="none"), dict(return_lse=True), dict(grad_weight_out=True)):
        assert [schedule(m, **kw) for m in (limit, limit + 1)] == ["stored", "recompute"]
    for asked in ("auto", *SCHEDULES):
        assert (
            schedule(1, dtype="float16", asked=asked) == schedule(1, label_smoothing=True, asked=asked) == "recompute"
        )
    assert [schedule(10**6, asked=s) for s in SCHEDULES] == SCHEDULES
    assert schedule(1, "none", asked="chunked") == "recompute"


def test_when_recompute_computes_dx_in_forward():
    def config(reduction="mean", chunk_size=None, **kw):
        problem = LinearCrossEntropyProblem(128_256, 4096, kw.pop("dtype", "bfloat16"), reduction, **kw)
        return kernel_config(problem, 10**6, "recompute", chunk_size)

    assert [config(r).dx_in_forward for r in ("mean", "sum", "none")] == [True, True, False]
    for kw in (dict(dtype="float16"), dict(label_smoothing=True), dict(return_lse=True)):
        assert not config(**kw).dx_in_forward
    assert config().chunk_rows == 4096  # exp_logits as large as dW
    assert config(grad_weight_out=True).chunk_rows == 1024  # 256 MiB of exp_logits
    assert config(chunk_size=129).chunk_rows == 256
    assert not kernel_config(LinearCrossEntropyProblem(128_256, 4096, "bfloat16", "mean"), 1, "chunked").dx_in_forward


def test_rows_whose_exp_logits_are_kept():
    def of(m, v=128_256, h=4096, dtype="bfloat16", chunk=None, asked="auto", **kw):
        problem = LinearCrossEntropyProblem(v, h, dtype, kw.pop("reduction", "none"), **kw)
        config = kernel_config(problem, m, asked, chunk)
        assert config.schedule == ("stored" if m * v * 2 <= STORED_BYTES else "recompute") or asked != "auto"
        layout = choose_layout(*config, m, v, h, True, 2, True, False)
        assert layout.kept == (m if config.schedule == "stored" else config.chunk_rows * config.keeps_first)
        assert max(b.v1 - b.v0 for b in layout.blocks or [ClassBlock(0, 0, 0)]) <= KEPT_BLOCK or not config.keeps_first
        return layout.kept

    assert [of(m) for m in (8192, 12_288, 16_384, 32_768, 65_536)] == [8192, 6144, 8192, 6784, 0]
    assert of(16_384, reduction="mean", return_lse=True) == 8192
    assert of(16_384, chunk=3000) == 2816  # as forward's chunks
    assert of(16_384, chunk=1024) == 0  # less than an eighth
    assert of(16_384, asked="recompute") == 0
    assert of(16_384, reduction="mean", grad_weight_out=True) == 0  # dX is computed in forward
    assert of(16_384, reduction="mean", asked="recompute") == 0
    for kw in (dict(dtype="float16"), dict(label_smoothing=True)):
        problem = LinearCrossEntropyProblem(128_256, 4096, kw.pop("dtype", "bfloat16"), "none", **kw)
        assert not kernel_config(problem, 16_384).keeps_first


def test_chunk_rows():
    for v, (m, most) in itertools.product((2, 256, 32_000, 128_256, 262_144, 10**9), ((1, 14_336), (10**9, 10_240))):
        problem = LinearCrossEntropyProblem(v, 4096, "bfloat16", "mean")
        rows = kernel_config(problem, m).chunk_rows
        assert rows % 128 == 0
        bounds = (v, MAX_CHUNK_BYTES), (v + 4096, ONE_CHUNK_BYTES)
        fits, is_few = (rows * n * 2 <= size for n, size in bounds)
        one_more_fits, more_are_few = ((rows + 128) * n * 2 <= size for n, size in bounds)
        assert rows == 128 or (fits and (rows <= most or is_few))
        assert not (one_more_fits and (rows < most or more_are_few))
        assert [kernel_config(problem, m, chunk_size=n).chunk_rows for n in (1, 128, 129)] == [128, 128, 256]
    shapes = {  # M, H, V: the chunks' rows
        (8192, 2048, 151_936): 8192,
        (16_384, 640, 262_144): 4096,
        (16_384, 2048, 128_256): 4096,
        (16_384, 4096, 128_256): 8192,
        (65_536, 4096, 128_256): 9472,
    }
    for (m, h, v), rows in shapes.items():
        assert even_chunks(m, kernel_config(LinearCrossEntropyProblem(v, h, "bfloat16", "mean"), m).chunk_rows) == rows
    assert [even_chunks(m, 512) for m in (1, 512, 513, 1025, 1536, 1537)] == [128, 512, 384, 384, 512, 512]


def test_first_classes():
    assert first_classes(8192, 128_256, 4096, 2) == (42_240, 358_612_992, 2048)
    assert first_classes(65_536, 128_256, 4096, 2) is None  # chunks of 256 rows
    assert first_classes(300, 700, 8, 2) is None  # one block of dlogits
    assert first_classes(4096, 32_000, 2048, 2) is None  # chunks of half a wave of tiles
    for m, v, h, itemsize in ((8192, 128_256, 4096, 2), (1000, 128_257, 4096, 4), (16_384, 128_256, 4096, 2)):
        columns, offset, part_rows = first_classes(m, v, h, itemsize)
        assert columns * h * itemsize <= offset <= v * h * itemsize - m * columns * 2
        assert part_rows * (v - columns) * 2 <= offset


def test_layouts_of_the_headline_shape():
    def of(schedule, m=8192, v=128_256, h=4096, chunk=None, dx=True, dw=2, owns_dw=True, dw_in_forward=False):
        config = kernel_config(LinearCrossEntropyProblem(v, h, "bfloat16", "mean"), m, schedule, chunk)
        return choose_layout(*config, m, v, h, dx, dw, owns_dw, dw_in_forward)

    assert of("chunked")[:3] == (8192, 42_752, 350_224_384)  # a third of exp_logits in dw's storage
    assert of("chunked", m=65_536)[:3] == (9472, 0, 0)  # dw's fp32 sums fill its storage
    assert of("chunked", dw=None).columns == 0
    assert of("recompute", dw_in_forward=True)[:3] == (2048, 42_240, 358_612_992)
    assert of("recompute", dw_in_forward=True).blocks == of("recompute").blocks[1:]
    assert of("recompute", chunk=4096)[:5] == (4096, 0, 0, (), 768)
    assert of("recompute", chunk=8192).dw_block == of("recompute", chunk=4096, owns_dw=False).dw_block == 0
    assert of("recompute", dw=None).chunk_rows == 1024  # 256 MiB of exp_logits
    assert of("recompute", dx=False, dw=None).chunk_rows == 4096  # none are stored


def test_shared_storage_overwrites_no_live_data():
    for rows, h, v, itemsize in itertools.product((1, 5, 128, 300, 1000), (8, 136, 1024), (1, 256, 700, 5003), (2, 4)):
        plan = shared_storage(rows, v, h, itemsize)
        size, c = v * h * itemsize, plan.v1 if plan else 0
        # the most columns that fit: one more tile does not
        more = c + COLUMN_MULTIPLE
        assert more * (rows * 2 + h * itemsize) > size - 1024 or more > v
        if plan is None:
            continue
        assert c % COLUMN_MULTIPLE == 0
        assert 0 < c <= v
        assert plan.offset % 1024 == 0
        assert plan.offset + rows * c * 2 <= size
        # The first GEMM writes c classes of dW and reads exp_logits from `offset` on; the second overwrites these.
        assert c * h * itemsize <= plan.offset


def test_recompute_blocks_overwrite_no_live_data():
    shapes = itertools.product((1, 128, 300, 4096), (8, 136, 1024), (1, 256, 257, 5003, 20_011), (2, 4, None))
    for m, h, v, itemsize in shapes:
        for scratch in (256, 768, scratch_columns(m, True, True)):
            blocks = recompute_blocks(m, v, h, itemsize, scratch)
            assert [b.v0 for b in blocks] + [v] == [0] + [b.v1 for b in blocks]
            assert all(b.v0 < b.v1 for b in blocks)
            assert all(b.v0 % COLUMN_MULTIPLE == 0 for b in blocks)
            row = h * (itemsize or 0)
            for v0, v1, offset in blocks:
                if offset is None:
                    assert v1 - v0 <= scratch
                    continue
                assert itemsize
                assert offset % 1024 == 0
                assert (v1 - v0) % COLUMN_MULTIPLE == 0
                assert v1 * row <= offset  # behind the final rows of dw and those of this block
                assert offset + (v1 - v0) * m * 2 <= v * row


def test_number_of_recompute_blocks():
    blocks = recompute_blocks(8192, 128_256, 4096, 2, scratch_columns(8192, True, True))
    assert [(b.v1 - b.v0) // 256 for b in blocks] == [165, 111, 74, 49, 33, 20, 16, 11, 11, 11]
    assert sum(b.offset is None for b in blocks) == 2
    assert recompute_blocks(300, 700, 8, 2, scratch_columns(300, True, True)) == (ClassBlock(0, 700, None),)
    assert len(recompute_blocks(8192, 128_256, 4096, None, scratch_columns(8192, False, True))) <= 9
    assert len(recompute_blocks(1024, 128_256, 4096, 2, scratch_columns(1024, True, True))) == 3


# The portable path ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("v", [2, 256, 32_000, 128_256, 262_144])
@pytest.mark.parametrize(
    "dtype, softcap, size",
    [("bfloat16", False, 6), ("bfloat16", True, 10), ("float32", False, 4), ("float64", True, 16)],
)
def test_portable_chunks_fit_the_budget_for_any_m(v, dtype, softcap, size):
    problem = LinearCrossEntropyProblem(v, 8, dtype, "mean", softcap)
    (rows,) = {linear_cross_entropy_config(problem, m).chunk_rows for m in (0, 1, 4096, 10**6)}
    assert rows % 128 == 0
    assert rows * size * v <= CHUNK_BYTES < (rows + 128) * size * v


def test_portable_schedule_rule():
    def schedule(reduction, m, return_lse=False, **kw):
        problem = LinearCrossEntropyProblem(128_256, 8, "bfloat16", reduction, return_lse=return_lse)
        return linear_cross_entropy_config(problem, m, **kw).schedule

    limit = CHUNK_BYTES // (4 * 128_256)
    assert [schedule("none", m) for m in (limit, limit + 1)] == ["stored", "recompute"]
    assert [schedule("mean", m, return_lse=True) for m in (limit, limit + 1)] == ["stored", "recompute"]
    assert {schedule(r, m) for r in ("mean", "sum") for m in (1, 10**6)} == {"chunked"}
    assert [schedule("none", 10**6, schedule=s) for s in SCHEDULES] == SCHEDULES
    huge = LinearCrossEntropyProblem(10**8, 8, "float64", "mean")
    assert linear_cross_entropy_config(huge, 1).chunk_rows == 128
    assert linear_cross_entropy_config(huge, 1, chunk_size=3).chunk_rows == 3
