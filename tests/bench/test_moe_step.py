"""benchmarks/moe_step.py on a tiny model: the same loss and gradients by all providers."""

import pytest

for package in ("transformers", "matplotlib"):
    pytest.importorskip(package)

from benchmarks import moe_step  # noqa: E402


def test_all_providers_compute_the_same_step(tmp_path):
    page = moe_step.main(["--tiny", "--commit", "abc", "--out", str(tmp_path)]).read_text()
    rows = {
        name: columns
        for name, *columns in (
            [cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")
        )
    }
    assert set(moe_step.PROVIDERS) <= set(rows)
    _, _, loss, norm = map(float, rows["plain"])
    for name in moe_step.PROVIDERS:
        ms, _, *found = map(float, rows[name])
        assert ms > 0
        assert found == pytest.approx([loss, norm], rel=5e-3), name  # bf16 rounding differs
