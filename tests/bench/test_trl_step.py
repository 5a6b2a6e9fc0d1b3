"""benchmarks/trl_step.py on a tiny model: the same losses and gradients by all providers."""

import pytest

for package in ("trl", "matplotlib"):
    pytest.importorskip(package, reason="needs the extra integrations")

from benchmarks import trl_step  # noqa: E402

pytestmark = pytest.mark.integrations


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # of TRL and its libraries
def test_all_providers_compute_the_same_losses(tmp_path):
    page = trl_step.main(["--tiny", "--commit", "abc", "--out", str(tmp_path)]).read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    values = {(kind, provider): [float(n) for n in rest] for kind, provider, *rest in rows[2:]}
    assert set(values) == {(kind, provider) for kind in trl_step.LOSSES for provider in trl_step.PROVIDERS}
    for (kind, provider), (ms, _, _, loss, norm) in values.items():
        assert ms > 0
        # bf16 rounding differs; GRPO's loss is a difference, near 0
        assert loss == pytest.approx(values[kind, "TRL"][3], rel=1e-3, abs=1e-3), (kind, provider)
        assert norm == pytest.approx(values[kind, "TRL"][4], rel=2e-2), (kind, provider)
        assert norm > 0
