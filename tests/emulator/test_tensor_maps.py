"""Mistakes in kernels that change tensor maps. tests/emulator/tensor_map_forms.py has each instruction by itself."""

import dataclasses

import pytest

from quackish.emulator import Fault
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
