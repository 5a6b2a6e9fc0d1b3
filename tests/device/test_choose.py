"""The choice of configs: forced, from the user's table, or analytical; illegal configs."""

import dataclasses
import itertools
import json
import threading
import warnings

import pytest
import torch

import quackish
from quackish import config, errors
from quackish.device import choose, launch, toolchain, tuned
from quackish.device.kernel_device import KernelDevice, substitute
from quackish.device.kernel_for import CompiledKernel
from quackish.gpu import B200, H100, H200
from quackish.kernels.gemm.problem import Store
from quackish.kernels.gemm.sm90_config import GemmConfig, gemm_smem_bytes, gemm_why_illegal
from quackish.ops.linear_cross_entropy import launch_problems
from quackish.ops.linear_cross_entropy.calls import RowState
from quackish.ops.linear_cross_entropy.gemm_problems import (
    Dlogits,
    LceGemmProblem,
    RowsOut,
    Softmax,
    StoreWithResidual,
    gemm_config,
)
from quackish.ops.linear_cross_entropy.launches import LceKernels
from quackish.ops.mlp.gemm_problems import MlpGemmProblem, Up
from quackish.ops.rms_norm.api import rms_norm, rms_norm_backward, rms_norm_forward
from quackish.ops.rms_norm.problems import (
    MAX_N,
    MAX_N_TWO_SUMS,
    RmsNormBwdConfig,
    RmsNormBwdProblem,
    RmsNormFwdConfig,
    RmsNormFwdProblem,
    rms_norm_bwd_config,
    rms_norm_bwd_smem_bytes,
    rms_norm_bwd_why_illegal,
    rms_norm_fwd_config,
    rms_norm_fwd_why_illegal,
)
from quackish.testing.errors import error, same_bits
from tests import idle_kernels
from tests.variants import one_per

BF16, FP32 = "bfloat16", "float32"
FORWARD = RmsNormFwdProblem(4096, BF16, BF16, BF16)
BACKWARD = RmsNormBwdProblem(4096, BF16, BF16, BF16, dx_dtype=BF16, dweight_dtype=BF16)
LOGITS = LceGemmProblem(Softmax(), BF16, BF16)
DLOGITS = LceGemmProblem(Dlogits(), BF16, BF16)
DX = LceGemmProblem(RowsOut(), BF16, BF16, b_major="n")
DW = LceGemmProblem(Store(), BF16, BF16, a_major="m", b_major="n", live="k", split_k_tail=True)
DW_PINGPONG = dataclasses.replace(DW, split_k_tail=False)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the user's table, empty."""
    monkeypatch.setenv("QUACKISH_CONFIG_DIR", str(tmp_path))
    errors._warned.clear()
    choose.reload()
    yield tmp_path
    monkeypatch.undo()
    choose.reload()


# Forced --------------------------------------------------------------------------------------------------------------


def chosen(problem=BACKWARD, on=H200):
    return choose.choose(problem, on)


def test_fields_and_whole_configs_are_forced_for_the_block():
    analytical, whole = chosen().config, RmsNormBwdConfig(512, 256, 3, 1)
    with config(rms_norm_backward=dict(num_stages=4, ctas_per_sm=1)):
        made = dataclasses.replace(analytical, num_stages=4, ctas_per_sm=1)
        assert chosen() == (made, "forced", "with quackish.config(rms_norm_backward=...)")
        assert chosen(FORWARD).source == "analytical"
        with config(rms_norm_backward=dict(num_stages=2), rms_norm_forward=dict(threads=512)):  # inner wins
            assert chosen().config == dataclasses.replace(made, num_stages=2)
            assert chosen(FORWARD).config.threads == 512
            with config(rms_norm_backward=whole):
                assert chosen().config == whole
        assert chosen().config == made
    assert chosen() == choose.analytical(BACKWARD, H200)
    assert quackish.config is config


def test_an_exception_ends_the_block():
    with pytest.raises(KeyError), config(rms_norm_backward=dict(num_stages=4)):
        raise KeyError
    assert chosen().source == "analytical"


def test_blocks_end_in_any_order():
    """As those of several threads may. Two of them are equal."""
    first, equal, last = (config(rms_norm_backward=dict(num_stages=n)) for n in (4, 4, 2))
    for block in (first, equal, last):
        block.__enter__()
    first.__exit__(None, None, None)
    assert chosen().config.num_stages == 2
    last.__exit__(None, None, None)
    assert chosen().config.num_stages == 4
    equal.__exit__(None, None, None)
    assert chosen().source == "analytical"


@pytest.mark.parametrize(
    "forced, text",
    [
        (dict(rms_norm=dict(threads=32)), "no kernel 'rms_norm'; expected one of rms_norm_forward, rms_norm_backward"),
        (dict(rms_norm_backward=dict(stages=4)), "rms_norm_backward has no field 'stages'; expected one of threads"),
        (dict(rms_norm_backward=dict(threads=True)), "threads is True, a bool; expected an int"),
        (dict(lce_dw=dict(group_along=1)), "lce_dw: group_along is 1, an int; expected a str"),
        (dict(rms_norm_backward=RmsNormFwdConfig(256, 128)), "is a RmsNormFwdConfig; expected a dict of fields, or a"),
        (dict(rms_norm_forward=RmsNormFwdConfig(256.0, 128)), "threads is 256.0, a float; expected an int"),
    ],
)
def test_invalid_arguments_of_config(forced, text):
    with pytest.raises(ValueError) as error_info, config(**forced):
        raise AssertionError
    assert text in str(error_info.value)


def test_a_gemm_has_a_name_for_each_product():
    of = dict(lce_logits=LOGITS, lce_dlogits=DLOGITS, lce_dx=DX, lce_dw=DW)
    for name, problem in of.items():
        with config(**{name: dict(group=4)}):
            forced = [other for other, p in of.items() if chosen(p).source == "forced"]
            assert forced == [name], problem
    with config(lce_dx=dict(group=4)):  # the accumulation of `recompute`
        assert chosen(LceGemmProblem(Store(accumulate=True), BF16, FP32, b_major="n")).config.group == 4


# Legal or not --------------------------------------------------------------------------------------------------------


def every_size():
    around = {n + d for k in range(19) for n in (1 << k, 3 << k, 5 << k) for d in (-9, -1, 0, 1, 8)}
    return sorted(n for n in around | set(range(1, 600, 13)) if 0 < n <= MAX_N)


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 8, 9, 255, 1024, 4095, 4096, 5120, 8200, 20_480, 65_544, 131_072, MAX_N),
        pytest.param(every_size(), marks=pytest.mark.exhaustive),
    ],
    ids=["some", "every size"],
)
def test_the_analytical_choice_of_a_norm_is_legal(sizes):
    for n, aligned in itertools.product(sizes, (True, False)):
        if aligned and n % 8:
            continue
        for x, y, w, b, r in itertools.product(
            (BF16, FP32), (BF16, FP32), (None, BF16, FP32), (None, FP32), (None, FP32)
        ):
            p = RmsNormFwdProblem(n, x, y, w, b, r, aligned=aligned)
            assert rms_norm_fwd_why_illegal(p, rms_norm_fwd_config(p, H200), H200) is None, p
        for x, dy, dres, dx, dw, db in itertools.product(
            (BF16, "float16", FP32), (BF16, FP32), (None, FP32), (None, BF16), (None, FP32), (None, FP32)
        ):
            if n > MAX_N_TWO_SUMS and dw and db:
                continue
            p = RmsNormBwdProblem(n, x, dy, FP32, dres, dx, None, dw, db, aligned=aligned)
            assert rms_norm_bwd_why_illegal(p, rms_norm_bwd_config(p, H200), H200) is None, p


def test_the_analytical_choice_of_a_gemm_is_legal():
    for dtype, bias, softcap, smoothing in itertools.product(
        (BF16, "float16"), (None, FP32), (False, True), (False, True)
    ):
        options = dict(bias_dtype=bias, softcap=softcap, smoothing=smoothing, weighted=smoothing)
        for problem in (
            LceGemmProblem(Softmax(**options), dtype, None if smoothing else BF16),
            LceGemmProblem(Softmax(**options, recompute_flagged=True), dtype, None),
            LceGemmProblem(Dlogits(**options), dtype, dtype),
        ):
            assert gemm_why_illegal(problem, gemm_config(problem, H200), H200) is None, problem
    for out, split, accumulate in itertools.product((BF16, FP32), (False, True), (False, True)):
        for problem in (
            LceGemmProblem(RowsOut(), BF16, out, b_major="n", a_in_two=split),
            LceGemmProblem(Store(accumulate=accumulate), BF16, FP32, b_major="n"),
            dataclasses.replace(DW, out_dtype=out, epilogue=Store(accumulate=accumulate and out == FP32)),
        ):
            assert gemm_why_illegal(problem, gemm_config(problem, H200), H200) is None, problem


LONG = RmsNormBwdProblem(65_536, BF16, BF16, BF16, dx_dtype=BF16, dweight_dtype=BF16)
ODD = RmsNormBwdProblem(4097, BF16, BF16, BF16, dx_dtype=BF16, dweight_dtype=BF16, aligned=False)
SHORT = RmsNormBwdProblem(64, BF16, BF16, BF16, dx_dtype=BF16, dweight_dtype=BF16)
UP = MlpGemmProblem(Up("swiglu"), BF16, 64, BF16)
ILLEGAL = [
    (FORWARD, dict(threads=100), "threads is 100; expected a multiple of 32, up to 1024"),
    (FORWARD, dict(threads_per_row=4), "threads_per_row is 4; expected 8, 16 or a multiple of 32"),
    (FORWARD, dict(threads_per_row=96), "threads is 256; expected a multiple of threads_per_row 96"),
    (FORWARD, dict(split_n=3), "split_n is 3; expected one of (1, 2, 4, 8, 16)"),
    (FORWARD, dict(threads=512, split_n=2), "512 with split_n 2; expected threads_per_row 256"),
    (FORWARD, dict(threads_per_row=32), "128 elements of a row per thread; expected more threads, so"),
    (SHORT, dict(threads=32, threads_per_row=32, split_n=16), "split_n is 16; expected fewer CTAs"),
    (BACKWARD, dict(num_stages=1), "num_stages is 1; expected 0, or at least 2"),
    (ODD, dict(num_stages=2), "num_stages is 2; expected 0, as the rows do not start and end on 16"),
    (BACKWARD, dict(num_stages=8), "262288 bytes of shared memory per CTA; expected at most 232448 on"),
    (BACKWARD, dict(ctas_per_sm=9), "ctas_per_sm is 9 with threads 256; expected 1 to 8"),
    (BACKWARD, dict(threads=64, threads_per_row=32), "256 values per thread for 255 registers"),
    (DW, dict(tile_m=96), "tile_m is 96; expected one of 64, 128, 192, 256"),
    (DW, dict(cluster_n=16), "cluster_n is 16; expected one of 1, 2"),
    (DW, dict(num_stages=1), "num_stages is 1; expected at least 2"),
    (DW, dict(group=1 << 30), "group is 1073741824; expected from 1 to 256"),
    (DW, dict(num_stages=5), "279560 bytes of shared memory; expected at most 232448 on H200"),
    (DX, dict(pingpong=True), "pingpong is True; expected False, as the problem splits tiles along k"),
    (DW_PINGPONG, dict(tile_m=128, tile_n=256, num_stages=4), "registers; expected at most 200,"),
    (DW, dict(group_along="k"), "group_along is 'k'; expected one of 'm', 'n'"),
    (LOGITS, dict(tile_n=128), "tile_n is 128; expected 192, the number of classes per partial sum"),
    (LOGITS, dict(tile_m=64, cluster_m=1), "64 rows per cluster; expected a multiple of 128"),
    (DW, dict(tile_m=192, num_stages=2), "128 accumulator registers; expected at most 120, as a thread"),
    (UP, dict(tile_m=100), "tile_m is 100; expected one of 64, 128, 192, 256"),
    (UP, dict(tile_n=192), "tile_n is 192; expected a multiple of 128: half of it is the gate's"),
    (UP, dict(num_stages=7), "num_stages is 7 with tiles of 128 x 128 x 64, 247568 bytes of shared "),
]  # fmt: skip


@pytest.mark.parametrize("problem, fields, text", ILLEGAL, ids=lambda v: str(v)[:40])
def test_illegal_configs(problem, fields, text):
    name = problem.spec.name_of(problem)
    with config(**{name: fields}), pytest.raises(ValueError) as error_info:
        chosen(problem)
    assert text in str(error_info.value)
    assert str(error_info.value).startswith(f"quackish.config: {name}: ")


# The formulas match the compiler.

COMPILED = [
    (LONG, RmsNormBwdConfig(512, 512, 3, 1, 8)),
    (dataclasses.replace(BACKWARD, n=1000, dbias_dtype=BF16), RmsNormBwdConfig(160, 32, 5, 1)),
    (BACKWARD, RmsNormBwdConfig(96, 96, 2, 2)),
    (dataclasses.replace(SHORT, dweight_dtype=None), RmsNormBwdConfig(32, 8, 2, 4)),
    (DW_PINGPONG, GemmConfig(tile_m=192, tile_n=128, num_stages=5, pingpong=True)),
    (ODD, RmsNormBwdConfig(512, 512, 0, 1, 2)),
    (dataclasses.replace(LOGITS, out_dtype=None), GemmConfig(tile_m=64, tile_n=192, num_stages=5)),
    (LOGITS, GemmConfig(tile_n=192)),
    (DLOGITS, GemmConfig(tile_m=192, tile_n=192, num_stages=3)),
    (DW, GemmConfig(tile_m=256, tile_n=128, num_stages=3)),
    (dataclasses.replace(DX, split_k_tail=True, a_in_two=True), GemmConfig(tile_m=64, tile_n=128, cluster_n=2)),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("problem, made", one_per(lambda problem, made: type(made), COMPILED), ids=str)
def test_shared_memory_is_as_compiled(problem, made):
    variant = problem.spec.variant(H200)
    assert variant.why_illegal(problem, made, H200) is None
    used = launch.resources(problem.spec.kernel_class(H200), problem, made, H200.target)
    if isinstance(problem, RmsNormBwdProblem):
        assert used.smem_bytes == rms_norm_bwd_smem_bytes(problem, made)
    else:
        assert used.smem_bytes == gemm_smem_bytes(problem, made)
        assert used.threads == made.threads


# Caching of choices --------------------------------------------------------------------------------------------


@pytest.fixture
def launches():
    """The launches, in order. CPU tensors go to idle kernels of an H200."""
    with idle_kernels.on_cpu() as launches:
        yield launches


def tensors(n=512):
    return torch.randn(4, n).requires_grad_(), torch.ones(n).requires_grad_()


def test_calls_in_a_block_use_the_forced_config(launches):
    x, w = tensors()
    for _ in range(2):  # plans are cached the second time
        for forced in (None, dict(threads=64)):
            launches.clear()
            with config(**({} if forced is None else dict(rms_norm_forward=forced, rms_norm_backward=forced))):
                rms_norm(x, w).sum().backward()
                _, _, rstd = rms_norm_forward(x, w)
                rms_norm_backward(x, x, w, rstd)
            assert len(launches) == 4
            assert [made.threads == 64 for _, _, made in launches] == [forced is not None] * 4


def test_a_block_around_backward_only(launches):
    x, w = tensors()
    rms_norm(x, w).sum().backward()  # from here on the plan has a cached backward
    usual = launches[-1].config
    inside, after = rms_norm(x, w), rms_norm(x, w)
    with config(rms_norm_backward=dict(threads=64)):
        thread = threading.Thread(target=lambda: inside.sum().backward())  # a block applies to other threads too
        thread.start()
        thread.join()
        assert launches[-1].config == dataclasses.replace(usual, threads=64)
        late = rms_norm(x, w)
    after.sum().backward()
    assert launches[-1].config == usual
    late.sum().backward()
    assert launches[-1].config == usual


def test_an_illegal_config_is_refused_before_anything_is_launched(launches):
    x, w = tensors()
    y = rms_norm(x, w)
    launches.clear()
    with config(rms_norm_backward=dict(num_stages=1), rms_norm_forward=dict(threads=33)):
        with pytest.raises(ValueError, match="rms_norm_forward: threads is 33; expected a multiple of 32, up to 1024"):
            rms_norm(x, w)
        with pytest.raises(ValueError, match="rms_norm_backward: num_stages is 1; expected 0, or at least 2"):
            y.sum().backward(retain_graph=True)
    assert launches == []
    y.sum().backward()
    assert launches[0].config.num_stages != 1


def test_a_choice_made_while_a_block_ends_is_not_cached():
    """Another thread leaves its block after this call chose a config and before it stored its plan."""
    x, w = tensors()
    block, (idle, launches) = config(rms_norm_forward=dict(threads=64)), idle_kernels.device()

    def choose_then_leave(*args):
        found = idle.kernel_for(*args)
        if choose._forced:
            block.__exit__(None, None, None)
        return found

    with substitute("cpu", KernelDevice(H200, choose_then_leave)):
        block.__enter__()
        rms_norm(x, w)
        rms_norm(x, w)
    assert [made.threads == 64 for _, _, made in launches] == [True, False]


def test_linear_cross_entropy_looks_up_its_kernels_again():
    idle, launches = idle_kernels.device()
    k = LceKernels(idle)
    e = xs = torch.zeros(128, 64, dtype=torch.bfloat16)
    state, out, factor = RowState.new(idle, 128), torch.zeros(64, 64), torch.ones(1)

    def both():
        launches.clear()
        k.dw(e, xs, state, 0, out, False)
        k.launch((), launch_problems.scatter, 64, torch.float32)
        k.scale(out, factor)
        return [made.threads if not isinstance(made, GemmConfig) else made.group for _, _, made in launches]

    usual = both()
    with config(lce_dw=dict(group=3)):
        assert both() == [3, *usual[1:]]
    assert both() == usual
    assert k._kernel.cache_info().currsize == 6  # two kernels in three epochs, without `scale`, which operations share


def test_a_kernel_of_an_old_choice_is_not_reused():
    launched, block = [], config(lce_dw=dict(group=3))
    e = torch.zeros(128, 64, dtype=torch.bfloat16)
    state = RowState.new(idle_kernels.device()[0], 128)

    def step():
        k.dw(e, e, state, 0, torch.zeros(64, 64), False)

    def kernel_for(problem, gpu):
        made = choose.choose(problem, gpu).config
        if not launched:  # simulates another thread that changes the choices and launches
            launched.append(None)
            block.__enter__()
            step()
        return CompiledKernel(lambda *args: launched.append(made.group), made)

    k = LceKernels(KernelDevice(H200, kernel_for))
    for _ in range(2):
        step()
    block.__exit__(None, None, None)
    step()
    assert launched[1:] == [3, 16, 3, 16]


# Tables --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def made_here(monkeypatch):
    """The toolchain of new rows, a dict that tests may change. None needs to be installed."""
    here = {"quackish": "1", "nvidia-cutlass-dsl": "2", "cuda": "cu13"}
    monkeypatch.setattr(toolchain, "versions", lambda: dict(here))
    return here


TUNED = RmsNormBwdConfig(512, 256, 3, 1)


def put(problem=BACKWARD, made=TUNED, on=H200):
    tuned.put(tuned.make_row(problem, on, made, "measured"))
    choose.reload()


def test_a_row_of_the_users_table_is_chosen(folder, made_here):
    put()
    assert chosen() == (TUNED, "user table", f"measured, in {folder / 'tuned.json'}")
    with config(rms_norm_backward=dict(num_stages=2)):
        assert chosen().config == dataclasses.replace(TUNED, num_stages=2)
    others = dict(n=4104), dict(x_dtype=FP32), dict(dweight_dtype=FP32), dict(dweight_dtype=None), dict(aligned=False)
    for fields in others:
        assert chosen(problem=dataclasses.replace(BACKWARD, **fields)).source == "analytical", fields
    # bits do not depend on the memory layout of rows
    assert chosen(problem=dataclasses.replace(BACKWARD, packed=False)).config == TUNED


def test_a_row_of_a_gemm_counts_for_its_epilogue(made_here):
    store, made = LceGemmProblem(Store(), BF16, BF16, b_major="n"), GemmConfig(tile_n=128)
    put(store, made)
    assert chosen(store).config == made
    for other in (RowsOut(), StoreWithResidual(), Store(scaled=True)):
        assert chosen(dataclasses.replace(store, epilogue=other)).source == "analytical"


def test_rows_of_another_gpu_or_toolchain_do_not_count(made_here):
    put()
    mig, other = dataclasses.replace(H200, name="H200 MIG 1g.18gb"), dataclasses.replace(H200, target="x")
    for on in (H100, B200, mig, other):
        assert chosen(on=on).source == "analytical"
    for name, version in [*made_here.items()]:
        made_here[name] = "0"
        choose.reload()
        assert chosen().source == "analytical"
        made_here[name] = version
    choose.reload()
    assert chosen().source == "user table"


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1, "rows": []}', '{"format": 2}', "deep", "a folder"])
def test_a_damaged_table_gives_one_warning(content, folder, made_here):
    if content == "a folder":
        (folder / "tuned.json").mkdir()
    else:
        (folder / "tuned.json").write_text(content.replace("deep", "[" * 100_000))
    choose.reload()
    with pytest.warns(RuntimeWarning, match=r"tuned.json is not used, analytical choices are"):
        assert chosen().source == "analytical"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose.reload()
        assert chosen(FORWARD).source == "analytical"


@pytest.mark.parametrize(
    "fields, text",
    [(dict(num_stages=1), "num_stages is 1"), (dict(stages=1), "stages"), (dict(split_n="x"), "split_n")],
)
def test_an_illegal_row_gives_one_warning(fields, text, folder, made_here):
    put()
    content = json.loads((folder / "tuned.json").read_text())
    content["rows"][0]["config"] |= fields
    (folder / "tuned.json").write_text(json.dumps(content))
    choose.reload()
    with pytest.warns(RuntimeWarning, match=f"A row of .*tuned.json is not used: .*{text}"):
        assert chosen().source == "analytical"


def test_rows_are_replaced_added_and_removed(folder, made_here):
    put()
    put(problem=dataclasses.replace(BACKWARD, n=2048))
    put(made=RmsNormBwdConfig(256, 256, 2, 1))
    put(on=B200)
    assert [(row.gpu, row.problem["n"], row.config["num_stages"]) for row in tuned.rows()] == [
        ("H200", 2048, 3), ("H200", 4096, 2), ("B200", 4096, 3),
    ]  # fmt: skip
    row = tuned.make_row(BACKWARD, H200, TUNED, "")
    assert tuned.put(row, keep=False)
    assert not tuned.put(row, keep=False)
    assert len(tuned.read()) == 2


# On a GPU ------------------------------------------------------------------------------------------------------------


def norm_step(x, w, dy):
    y = rms_norm(x, w, backend="cute")
    return y, *torch.autograd.grad(y, (x, w), dy)


@pytest.mark.gpu
def test_a_forced_norm_keeps_the_promised_bits():
    x, dy = (torch.randn(1000, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w = torch.randn(4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    x.requires_grad_()
    usual = norm_step(x, w, dy)
    # rows per CTA and stages do not change the order of sums in a row
    for same, fields in (
        (True, dict(rms_norm_forward=dict(threads=512), rms_norm_backward=dict(num_stages=4))),
        (False, dict(rms_norm_forward=dict(threads=128, threads_per_row=128), rms_norm_backward=dict(threads=128))),
        (False, dict(rms_norm_forward=dict(split_n=2), rms_norm_backward=RmsNormBwdConfig(256, 256, 2, 2))),
    ):
        with config(**fields):
            got = norm_step(x, w, dy)
        assert all(error(one, other.double()).within(1e-3, 0.02) for one, other in zip(got, usual, strict=True))
        assert not same or all(same_bits(one, other) for one, other in zip(got, usual, strict=True))
    assert all(same_bits(one, other) for one, other in zip(norm_step(x, w, dy), usual, strict=True))
