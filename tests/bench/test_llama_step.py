"""benchmarks/llama_step.py on a tiny model: shared weights, the same loss by all providers, a page and a CSV."""

import csv
import sys
import types

import pytest

for package in ("transformers", "matplotlib"):
    pytest.importorskip(package)

from transformers.models.llama import modeling_llama  # noqa: E402

from benchmarks import llama_step  # noqa: E402


@pytest.mark.exhaustive
def test_all_providers_compute_the_same_step(tmp_path, monkeypatch):
    """A fake Liger replaces one global of transformers, and fails in its second use (compiled)."""
    plain_rope, patched = modeling_llama.apply_rotary_pos_emb, []

    def apply_liger_kernel_to_llama(model):
        patched.append(model)
        fails = len(patched) == 2

        def liger_rope(*args):
            if fails:
                raise RuntimeError("not compiled")
            return plain_rope(*args)

        modeling_llama.apply_rotary_pos_emb = liger_rope

    fake = types.ModuleType("liger_kernel.transformers")
    fake.apply_liger_kernel_to_llama = apply_liger_kernel_to_llama
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", fake)
    made, init = [], llama_step.Step.__init__
    monkeypatch.setattr(llama_step.Step, "__init__", lambda step, *args: made.append(step) or init(step, *args))

    arguments = ["--tiny", "--commit", "abc", "--out", str(tmp_path)]
    path = llama_step.main(arguments)
    assert modeling_llama.apply_rotary_pos_emb is plain_rope
    assert len({step.model.lm_head.weight for step in made}) == 1
    assert made[0].model.lm_head is not made[1].model.lm_head
    with path.with_suffix(".csv").open(newline="") as file:
        rows = {tuple(row[name] for name in llama_step.KEY): row for row in csv.DictReader(file)}
    providers = ("plain", "liger", "quackish")
    assert set(rows) == {("tiny", name, compiled) for name in providers for compiled in ("no", "layers")}
    failed = rows.pop(("tiny", "liger", "layers"))
    assert (failed["median_ms"], failed["loss"]) == ("", "")
    assert "not compiled" in failed["note"]
    loss, norm = (float(rows["tiny", "plain", "no"][column]) for column in ("loss", "grad_norm"))
    for key, row in rows.items():
        assert float(row["median_ms"]) > 0
        assert row["commit"] == "abc"
        # bf16 rounding differs
        assert float(row["loss"]) == pytest.approx(loss, rel=1e-3), key
        assert float(row["grad_norm"]) == pytest.approx(norm, rel=5e-3), key
    assert "| tiny | quackish | layers |" in path.read_text()
