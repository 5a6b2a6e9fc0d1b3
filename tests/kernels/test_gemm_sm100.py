"""Blackwell's GEMMs in the emulator: ragged shapes, one and two CTAs per tile, bits of Hopper's, mistakes.

Where the same tests run on Hopper's and Blackwell's kernels, they are in test_lce_gemms.py, test_grouped_mlp.py and
others: their path is named "kernels-b200/...".
"""

import contextlib
import dataclasses

import pytest
import torch

import quackish
from quackish import config
from quackish.device import choose
from quackish.device.kernel_device import device_of
from quackish.emulator import Fault
from quackish.gpu import B200, B300
from quackish.kernels.gemm import umma
from quackish.kernels.gemm.problem import Store
from quackish.kernels.gemm.sm100_config import GemmSm100Config, gemm_sm100_why_illegal
from quackish.ops.linear_cross_entropy.calls import ExpLogits
from quackish.ops.linear_cross_entropy.gemm_problems import (
    DlogitsArgs,
    LceGemmProblem,
    ResidualArgs,
    RowsOutArgs,
    Softmax,
)
from quackish.ops.linear_cross_entropy.launches import LceKernels
from quackish.ops.mlp import gemm_problems as mlp
from quackish.testing.errors import error, same_bits
from tests.emulated_kernels import NO_SLOT, lce_kernels
from tests.emulator_cases import BLACKWELL, emulated
from tests.linear_cross_entropy.test_gemms import Case, close, dlogits, dw_args, launch, problems, softmax
from tests.mlp.test_grouped_gemm import DOWN_BACKWARD, OTHERS, UP
from tests.variants import check_compiles, num_options, one_per_kernel

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = ("lce_logits", "lce_dlogits", "lce_dx", "lce_dw")
ONE_CTA = dict(ctas=1, num_stages=4)


@contextlib.contextmanager
def kernels_on(setting, one_cta=False):
    """Our kernels of linear cross entropy on an emulated GPU."""
    forced = dict.fromkeys(NAMES, ONE_CTA) if one_cta else {}
    with config(**forced), emulated(setting) as report:
        yield LceKernels(device_of(torch.device("cpu"))), report


# Compiled ------------------------------------------------------------------------------------------------------------


def compiled():
    """(kernel, problem, GPU). Some problems of Hopper's kernels; both targets have the same sources.

    Of each epilogue of linear cross entropy, those with the most and the fewest options.
    """
    by_options = sorted((p for p in problems() if not p.split_k_tail), key=num_options)
    for ordered in by_options, by_options[::-1]:
        last = {type(problem.epilogue): problem for problem in ordered}
        for i, problem in enumerate(last.values()):
            yield "lce_gemm", problem, (B200, B300)[i % 2]
    for i, problem in enumerate([*UP, *DOWN_BACKWARD, *OTHERS][::7]):
        tile = ("256x256", "128x256")[i // 2 % 2]
        yield "grouped_gemm", dataclasses.replace(problem, cluster_tile=tile), (B200, B300)[i % 2]


@pytest.mark.parametrize("name, problem, gpu", one_per_kernel(compiled()), ids=str)
def test_compiles(name, problem, gpu):
    used = check_compiles(name, problem, choose.analytical(problem, gpu).config, gpu)
    assert used.threads == 192


# Shapes --------------------------------------------------------------------------------------------------------------

# Rows, classes, hidden size: each side of a pair's tile, and of a CTA's
OF_PAIRS = [(255, 127, 72), (257, 255, 8), (129, 257, 72), (257, 1, 8), (130, 513, 8)]
OF_ONE_CTA = [(1, 257, 8), (127, 129, 72), (129, 255, 8)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "setting, one_cta, shapes", [(BLACKWELL[0], False, OF_PAIRS), (BLACKWELL[1], True, OF_ONE_CTA)]
)
def test_ragged_shapes(setting, one_cta, shapes):
    for rows, v, h in shapes:
        c, truth = Case(rows=rows, v=v, h=h), lce_kernels()
        epilogue = DlogitsArgs(coefs=torch.rand(rows, 4), slot_target=c.slot_target, softcap=0.0, v0=0)
        epilogue.coefs[:, 0] = torch.logsumexp(c.x.float() @ c.w.float().T, 1)
        outs = [torch.full((rows, h), float("nan"), dtype=BF16), torch.ones(v, h)]
        results = []
        for on in (None, setting):
            with kernels_on(on, one_cta) if on else contextlib.nullcontext((truth, None)) as (k, _):
                got = softmax(c, k)
                dx = launch(
                    k, "dx", e=ExpLogits(c.e), w=c.w, state=c.num_live, start=0, out=outs[0],
                    epilogue=RowsOutArgs(c.row_scale, c.order),
                ).out  # fmt: skip
                dw = launch(k, "dw", **dw_args(c, outs[1], accumulate=True)).out
                results.append((got.exp_logits, got.part_sum.sum(1), got.target_logit, dlogits(c, k, epilogue), dx, dw))
        for i, (want, got, eps) in enumerate(zip(*results, (0.004, 2e-5, 2e-5, 0.005, 0.004, 1e-5), strict=True)):
            assert close(got, want, eps), (i, rows, v, h)


@pytest.mark.exhaustive
@pytest.mark.parametrize("setting", BLACKWELL)
def test_tiles_without_flags_are_skipped(setting):
    """Rows 256 to 511, a whole tile of two CTAs, are not recomputed."""
    c = Case(rows=700, v=200, h=64)
    flagged = torch.tensor([3, 650])
    with kernels_on(setting) as (k, report):
        before = softmax(c, k)
        without = report.launches[-1].mmas
        c.grow(flagged)
        c.update_shift()
        got, truth = softmax(c, k), softmax(c, lce_kernels())
    assert without == 0
    assert report.launches[-1].mmas == 2 * 4  # tiles of rows with flags, steps of 16 along k
    assert same_bits(got.flags, truth.flags)
    assert close(got.part_sum.sum(1), truth.part_sum.sum(1), 0.01)
    assert same_bits(got.exp_logits[256:512], before.exp_logits[256:512])


# Bits ----------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_bits_of_integers_are_hoppers():
    """Products of small integers are exact in any order, and these epilogues use no approximate function."""
    generator = torch.Generator().manual_seed(0)

    def integers(*shape):
        return torch.randint(-4, 5, shape, generator=generator).to(BF16)

    c = Case(rows=300, v=321, h=136, live=270)
    c.e, c.w, c.x = integers(300, 384)[:, :321], integers(321, 136), integers(300, 136)
    c.x[270:] = c.e[270:] = 0
    c.row_scale = torch.full((300,), 0.5)
    first_slots = torch.full((321,), NO_SLOT, dtype=torch.int32)
    first_slots[::3] = torch.arange(107, dtype=torch.int32)
    residual = ResidualArgs(first_slots, torch.full((108, 136), 77, dtype=torch.int16))
    split = ExpLogits(c.e[:, :64].contiguous(), 64, c.e[:, 64:])

    def results(k):
        nan = torch.full((300, 136), float("nan"))
        where = dict(w=c.w, state=c.num_live, start=0)
        yield launch(k, "dx", e=split, out=nan.to(BF16), epilogue=RowsOutArgs(c.row_scale, c.order), **where).out
        yield launch(k, "dx", e=ExpLogits(c.e), out=torch.ones_like(nan), accumulate=True, **where).out[:270]
        after = launch(k, "dw", **dw_args(c, torch.full((321, 136), float("nan"), dtype=BF16), residual=residual))
        yield after.out
        yield after.residual.rounding_residual
        yield launch(k, "dw", **dw_args(c, torch.ones(321, 136), True, factor=torch.tensor([0.25]))).out

    with emulated("h200/late/0"):
        hoppers = list(results(LceKernels(device_of(torch.device("cpu")))))
    for setting, one_cta in zip(BLACKWELL, (False, True), strict=True):
        with kernels_on(setting, one_cta) as (k, _):
            for got, want in zip(results(k), hoppers, strict=True):
                assert same_bits(got, want)


@pytest.mark.exhaustive
def test_a_loss_has_the_same_bits_with_more_rows_schedules_and_orders():
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=generator).to(BF16) for shape in ((300, 64), (700, 64)))
    target = torch.randint(0, 700, (300,), generator=generator)
    losses = []
    for setting, rows, schedule in (
        ("b200/late/0", 300, "chunked"), ("b200/late/0", 7, "recompute"), ("b200/at_once/3", 300, "recompute"),
    ):  # fmt: skip
        with emulated(setting):
            loss = quackish.linear_cross_entropy(
                x[:rows], w, target[:rows], reduction="none", schedule=schedule, chunk_size=256
            )
        losses.append(loss[:7])
    assert all(same_bits(loss, losses[0]) for loss in losses[1:])


@pytest.mark.exhaustive
def test_the_parallel_head_in_the_emulator():
    """One rank with all classes: the launches of every rank."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, generator=generator).to(BF16).requires_grad_() for s in ((150, 64), (300, 64)))
    target = torch.randint(0, 300, (150,), generator=generator)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        with emulated("b200/late/0") as report:
            loss = quackish.parallel.linear_cross_entropy(x, w, target, group=group)
            got = loss, *torch.autograd.grad(loss, (x, w))
    finally:
        torch.distributed.destroy_process_group()
    assert "lce_gemm" in {launch.kernel for launch in report.launches}
    x, w = (t.detach().double().requires_grad_() for t in (x, w))
    loss = torch.nn.functional.cross_entropy(x @ w.T, target)
    want = loss, *torch.autograd.grad(loss, (x, w))
    assert all(error(g.double(), t).norm <= eps for g, t, eps in zip(got, want, (1e-5, 0.01, 0.01), strict=True))


# Mistakes ------------------------------------------------------------------------------------------------------------


def bytes_of_one_cta(patch):
    stage_bytes = GemmSm100Config.stage_bytes.fget
    patch.setattr(GemmSm100Config, "stage_bytes", property(lambda c: stage_bytes(c) // c.ctas))


def released_before_it_is_read(patch):
    wait, release = umma.UmmaKernel.wait_for_tile, umma.UmmaKernel.release

    def wait_and_release(self, done, state, copy, rows):
        acc = wait(self, done, state, copy, rows)
        release(self, done, state)
        return acc

    patch.setattr(umma.UmmaKernel, "wait_for_tile", wait_and_release)
    patch.setattr(umma.UmmaKernel, "release", lambda self, done, state: None)


def freed_before_it_is_read(patch):
    patch.setattr(umma.UmmaKernel, "free_tensor_memory", lambda self, memory, accs: memory.free(accs.iterator))


MISTAKES = [bytes_of_one_cta, released_before_it_is_read, freed_before_it_is_read]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_noticed(mistake, monkeypatch, tmp_path):
    """Each of these has failed on a card for somebody. Nothing compiled with a mistake may stay in a cache."""
    from quackish import emulation

    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(tmp_path))
    c = Case(rows=1100, v=200, h=200)  # three tiles of a cluster: one more than accumulators
    emulation._loaded.clear()
    mistake(monkeypatch)
    try:
        with pytest.raises(Fault), kernels_on("b200/late/0") as (k, _):
            launch(k, "dx", e=ExpLogits(c.e), w=c.w, state=c.num_live, start=0, out=torch.ones(1100, 200))
    finally:
        emulation._loaded.clear()


# Configs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, tile", [(None, "256x256"), (128, "128x256"), (129, "256x256")])
def test_tiles_of_one_cta_for_few_rows(rows, tile):
    problem = mlp.MlpGemmProblem(mlp.Store(), "bfloat16", 64, "bfloat16")
    assert mlp.cluster_tile_for(problem, B200, rows, 512, 64) == tile
    assert mlp.cluster_tile_for(problem, B200, None, 512, 64, few_rows=True) == "128x256"


@pytest.mark.parametrize(
    "fields, problem, reason",
    [
        (dict(tile_n=128), LceGemmProblem(Softmax(), "bfloat16", None), "tile_n is 128; expected 256, the number of"),
        (dict(num_stages=7), LceGemmProblem(Store(), "bfloat16", "float32"), "num_stages is 7 with tiles of 256 x 256"),
        (dict(ctas=4), LceGemmProblem(Store(), "bfloat16", "float32"), "ctas is 4; expected one of 1, 2"),
        ({}, LceGemmProblem(Store(), "bfloat16", "float32", split_k_tail=True), "split_k_tail is True; expected False"),
    ],
)
def test_why_illegal(fields, problem, reason):
    assert gemm_sm100_why_illegal(problem, GemmSm100Config(**fields), B200).startswith(reason)


def test_default_configs_are_legal():
    for problem in (p for p in problems() if not p.split_k_tail):
        config = choose.analytical(problem, B300).config
        assert gemm_sm100_why_illegal(problem, config, B300) is None
