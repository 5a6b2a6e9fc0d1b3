"""Mistakes in kernels that change tensor maps. tests/emulator/tensor_map_forms.py has each instruction by itself."""

import dataclasses

import numpy as np
import pytest

from quackish.emulator import Fault, tensor_map
from tests.emulator import forms
from tests.emulator.test_forms import emulate


def changed(opcode, old, new):
    """Emulates the case of an opcode, with a text in its body replaced."""
    (form,) = forms.isa.load()[opcode]
    (case,) = forms.cases_of(form)
    assert old in case.body
    return emulate(dataclasses.replace(case, body=case.body.replace(old, new)))


@pytest.mark.parametrize(
    "opcode, old, new, message",
    [
        (
            "global_dim.global.b1024.b32",
            "@%p bra SKIP;\nfence",
            "@%p bra SKIP;\n//fence",
            "has not executed fence.proxy.tens",
        ),
        ("global_dim.shared::cta.b1024.b32", "@%p bra SKIP;\nfence", "@%p bra SKIP;\n//fence", "was changed, and CTA"),
        ("global_stride.global.b1024.b64", "0, 96", "0, 8", "global_stride by 8; it must be a multiple of 16"),
        ("box_dim.global.b1024.b32", "0, 4", "5, 4", "box_dim 5; a tensor map has 5"),
        ("box_dim.global.b1024.b32", "0, 4", "0, 257", "box_dim by 257; valid are 1 to 256"),
        ("global_dim.shared::cta.b1024.b32", "[%mine], 0", "[%mine+64], 0", "not a multiple of 128"),
    ],
)
def test_mistakes(opcode, old, new, message):
    with pytest.raises(Fault, match=message):
        changed(f"tensormap.replace.tile.{opcode}", old, new)


@pytest.mark.parametrize("field, new", [("element_stride", "0, 2"), ("elemtype", "9"), ("fill_mode", "1")])
def test_what_no_map_has_here(field, new):
    old = "0, 1;" if field == "element_stride" else {"elemtype": "2;", "fill_mode": "0;"}[field]
    with pytest.raises(RuntimeError, match=f"tensormap.replace of {field} by"):
        changed(f"tensormap.replace.tile.{field}.global.b1024.b32", f"[%map], {old}", f"[%map], {new};")


def test_elements_of_four_bits_are_copied_as_bytes():
    halves = np.zeros(32, np.uint32)
    halves[2] = 2 | 1 << 4 | 11 << 7  # rank 2, u4
    halves[3] = 32 // 16  # a row of 64 elements
    halves[8:10] = 64 - 1, 4 - 1
    halves[13], halves[14] = 31 << 24, 1  # a box of 32 x 2 elements
    decoded = tensor_map.decode(halves.tobytes())
    assert (decoded.element, decoded.sizes, decoded.box, decoded.box_bytes) == ("u4", (32, 4), (16, 2), 32)
    window = decoded.window((32, 1))
    assert (window.addresses.tolist(), window.row_bytes) == ([48, 80], 16)
    with pytest.raises(Fault, match="expected a multiple of 16 bytes"):
        decoded.window((16, 1))
