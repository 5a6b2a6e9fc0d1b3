"""A kernel whose configs have another type on another GPU family: forced, read from the user's table, and tuned."""

import dataclasses

import pytest

from quackish.device import choose, launch, tuned
from quackish.device.choose import config
from quackish.device.kernel_for import request_for
from quackish.device.spec import Tuning, Variant
from quackish.gpu import B200, H200
from quackish.kernels.gemm.sm90_config import GemmConfig
from quackish.ops.linear_cross_entropy.gemm_problems import LceGemmProblem, RowsOut, gemm_config
from quackish.tune import candidates

DX = LceGemmProblem(RowsOut(), "bfloat16", "bfloat16", b_major="n")


@dataclasses.dataclass(frozen=True)
class PairConfig:
    """Has one field of GemmConfig."""

    tile_n: int = 256
    ctas: int = 2


class PairGemm:
    pass


def why_illegal(problem, config, gpu):
    return None if config.ctas in (1, 2) else f"ctas is {config.ctas}; expected 1 or 2 on {gpu.name}"


TUNING = Tuning(lambda *args: [PairConfig(128), PairConfig(256, 1), PairConfig(256, 3)], lambda *args: 1.0, 1.0, None)


def chosen(on):
    return choose.choose(DX, on)


@pytest.fixture(autouse=True)
def second_family(monkeypatch, tmp_path):
    """B200 has a GEMM with configs of its own, and the user's table is empty."""
    variant = Variant(
        f"{__name__}:PairGemm", PairConfig, lambda problem, gpu: PairConfig(), why_illegal, f"{__name__}:TUNING"
    )
    monkeypatch.setitem(DX.spec.on, "sm_100", variant)
    monkeypatch.setenv("QUACKISH_CONFIG_DIR", str(tmp_path))
    monkeypatch.setattr("quackish.device.toolchain.versions", lambda: {"quackish": "0"})
    choose.reload()
    yield
    monkeypatch.undo()
    choose.reload()


def test_each_family_has_its_own_rule():
    assert chosen(H200).config == gemm_config(DX, H200)
    assert chosen(B200).config == PairConfig()
    assert chosen(B200).source == "analytical"
    request = request_for(DX, B200)
    assert request == launch.Request(LceGemmProblem.spec.kernel_class(B200), DX, PairConfig(), "sm_100a")
    assert repr(request.kernel_class).endswith("test_config_families.PairGemm>")


def test_configs_are_forced_for_each_family():
    with config(lce_dx=dict(tile_n=128)):  # a field of both
        assert chosen(H200).config == dataclasses.replace(gemm_config(DX, H200), tile_n=128)
        assert chosen(B200).config == PairConfig(128)
    with config(lce_dx=PairConfig(128, 1)):
        assert chosen(B200) == (PairConfig(128, 1), "forced", "with quackish.config(lce_dx=...)")
        with pytest.raises(ValueError, match=r"lce_dx is a PairConfig; .* or a GemmConfig\n.* on H200"):
            chosen(H200)
    with config(lce_dx=dict(ctas=3)):
        with pytest.raises(ValueError, match="lce_dx has no field 'ctas'; expected one of tile_m, tile_n"):
            chosen(H200)
        with pytest.raises(ValueError, match="ctas is 3; expected 1 or 2 on B200"):
            chosen(B200)
    with pytest.raises(ValueError, match="no field 'pairs'"), config(lce_dx=dict(pairs=1)):
        raise AssertionError


def test_the_users_table_has_the_configs_of_each_family():
    rows = {H200: dataclasses.replace(gemm_config(DX, H200), group=4), B200: PairConfig(128)}
    for on, made in rows.items():
        tuned.put(tuned.make_row(DX, on, made, "measured"))
    choose.reload()
    for on, made in rows.items():
        assert chosen(on).config == made
        assert chosen(on).source == "user table"
    tuned.put(tuned.make_row(DX, B200, GemmConfig(), "measured"))  # as an older version may have left
    choose.reload()
    with pytest.warns(RuntimeWarning, match=r"A row of .* is not used: .*unexpected keyword argument 'tile_m'"):
        assert chosen(B200).config == PairConfig()


def test_candidates_are_of_the_family():
    found = candidates.candidates(DX, B200, max_others=9)
    assert found == [PairConfig(), PairConfig(128), PairConfig(256, 1)]
    assert {type(one) for one in candidates.candidates(DX, H200, max_others=9)} == {GemmConfig}
