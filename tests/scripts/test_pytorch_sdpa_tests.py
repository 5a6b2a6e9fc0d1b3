"""scripts/pytorch_sdpa_tests.py with a small file in the place of PyTorch's."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "pytorch_sdpa_tests.py"

FILE = """
import unittest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

x, mask = torch.randn(1, 2, 5, 8), torch.ones(5, 5, dtype=torch.bool).tril()

class TestSDPA(unittest.TestCase):
    def test_good_mask(self):
        with sdpa_kernel(SDPBackend.MATH):
            want = F.scaled_dot_product_attention(x, x, x, mask)
        torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x, mask), want)

    @sdpa_kernel(SDPBackend.MATH)
    def test_good_only_math(self):
        F.scaled_dot_product_attention(x, x, x, mask)

    def test_good_without_a_call(self):
        torch.ones(1)

    def test_invalid_inputs_good(self):  # the script's list has test_invalid_inputs_
        self.assertRaises(RuntimeError, F.scaled_dot_product_attention, x, x.half(), x)

    def test_good_dropout_p_0_2(self):
        self.fail()

    def test_good_but_broken(self):
        F.scaled_dot_product_attention(x, x, x)
        self.fail()

    def test_invalid_inputs_bad(self):
        F.scaled_dot_product_attention(x, x, x)

    def test_bad(self):
        F.scaled_dot_product_attention(x, x, x, torch.zeros(5, 5), is_causal=False, dropout_p=0.5)
"""


GOOD = """
| TestSDPA.test_good_but_broken | 0 | 0 | 0 | 1 | 0 | 0 |
| TestSDPA.test_good_dropout_p_0_2 | 0 | 0 | 1 | 0 | 0 | 0 |
| TestSDPA.test_good_mask | 1 | 0 | 0 | 0 | 0 | 0 |
| TestSDPA.test_good_only_math | 1 | 0 | 0 | 0 | 0 | 0 |
| TestSDPA.test_good_without_a_call | 0 | 0 | 0 | 0 | 1 | 0 |
| TestSDPA.test_invalid_inputs_good | 0 | 0 | 1 | 0 | 0 | 0 |

| class | passed | failed | not applicable | fails with PyTorch's function | no call | skipped |
| --- | --- | --- | --- | --- | --- | --- |
| TestSDPA | 2 | 0 | 2 | 1 | 1 | 0 |

1 PyTorch's own function
4 calls of quackish
3 calls that stay PyTorch's
2 portable path, forward
"""
BROKEN = "test_good_but_broken fails with PyTorch's function: AssertionError: None\n"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "select, code, parts",
    [
        ("good", 0, [BROKEN, GOOD]),
        pytest.param(
            "bad",
            1,
            ["test_bad failed: ", "test_invalid_inputs_bad failed: it passes, but NOT_APPLICABLE has it: "],
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "without_a_call",
            1,
            ["| TestSDPA | 0 | 0 | 0 | 0 | 1 | 0 |"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_what_the_script_reports(select, code, parts, tmp_path):
    path = tmp_path / "test_transformers.py"
    path.write_text(FILE)
    command = [sys.executable, str(SCRIPT), str(path), "-k", select]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert all(part in done.stdout for part in parts), done.stdout
