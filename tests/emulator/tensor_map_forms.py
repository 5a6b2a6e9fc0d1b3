"""Kernels that change a tensor map in memory, and load a box of numbers by it."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from quackish.emulator import isa
from quackish.emulator.tensor_map import BYTES
from tests.emulator import forms
from tests.emulator.forms import Case

MAP_AT = 288  # words of scratch behind the tensor, at a multiple of 128 bytes
START = 8, 1
LOAD = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
PITCH = 48  # bytes of a row of 12 numbers


@dataclasses.dataclass(frozen=True)
class Box:
    """What the load sees, in numbers."""

    offset: int = 0  # of the tensor's address
    width: int = 12
    pitch: int = PITCH // 4
    columns: int = 8
    swizzled: bool = False

    def load(self, tensor: np.ndarray) -> np.ndarray:
        """The box in shared memory, as 16 numbers; those behind a smaller box are 0."""
        result = np.zeros(16, np.float32)
        for row in range(2):
            for column in range(self.columns):
                x, y = START[0] + column, START[1] + row
                place = self.columns * row + column
                place ^= (place >> 5 & 1) << 2 if self.swizzled else 0
                result[place] = tensor[self.offset + y * self.pitch + x] if x < self.width else 0
        return result


# Field: the operands behind the address, and the box that the changed map loads. The map has 12 columns.
CHANGES = {
    "global_address": ("%to_there", Box(offset=12)),
    "rank": ("1", Box()),  # of a map of rank 3
    "box_dim": ("0, 4", Box(columns=4)),
    "global_dim": ("0, 10", Box(width=10)),
    "global_stride": ("0, 96", Box(pitch=24)),
    "element_stride": ("0, 1", Box()),
    "elemtype": ("2", Box()),  # u32 instead of f32
    "interleave_layout": ("0", Box()),
    "swizzle_mode": ("1", Box(swizzled=True)),
    "swizzle_atomicity": ("0", Box()),
    "fill_mode": ("0", Box()),
}


def cases(form: isa.Form) -> Iterator[Case]:
    opcode = form.opcode
    is_replace = opcode.startswith("tensormap.replace")
    field = opcode.split(".")[3] if is_replace else "global_dim"
    operands, box = CHANGES[field]
    in_shared = "shared::cta" in opcode
    change = (
        opcode
        if is_replace
        else f"tensormap.replace.tile.global_dim.{'shared::cta' if in_shared else 'global'}.b1024.b32"
    )
    copy = (
        opcode
        if "cp_fenceproxy" in opcode
        else ("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned")
    )
    release = (
        opcode if ".release." in opcode and "fence.proxy" in opcode else "fence.proxy.tensormap::generic.release.gpu"
    )
    acquire = opcode if ".acquire." in opcode else "fence.proxy.tensormap::generic.acquire.gpu"
    random = forms.random_of(opcode)
    tensor = random.integers(-1000, 1000, 2 * forms.TENSOR_WORDS).astype(np.float32)
    place, store = ("%mine", "shared") if in_shared else ("%map", "global")
    copied = "\n".join(
        f"ld.param.b64 %v, [ENTRY_data+{i}]; st.{store}.b64 [{place}+{i}], %v;" for i in range(0, BYTES, 8)
    )
    size = 4 * 2 * box.columns
    body = f""".reg .b64 %map, %v, %to_there, %state; .reg .b32 %bar, %to, %mine, %i; .reg .pred %p, %q;
add.u64 %map, %scratch, {8 * MAP_AT}; add.u64 %to_there, %scratch, {8 * forms.TENSOR_AT + PITCH};
mov.b32 %bar, %base; add.u32 %to, %base, 1024; add.u32 %mine, %base, 2048;
mov.u32 %i, %tid.x; setp.ne.u32 %p, %i, 0; mad.lo.u32 %s, %i, 16, %to;
st.shared.b64 [%s], 0; st.shared.b64 [%s+8], 0; {forms.FENCE}
@%p bra CHANGED;
{copied}
{change} [{place}], {operands};
{"" if in_shared else release + ";"}
{forms.INIT.format(1)}
mbarrier.arrive.expect_tx.shared.b64 %state, [%bar], {size};
CHANGED:
bar.sync 0;
{f"{copy} [%map], [%mine], 128;" if in_shared else ""}
@%p bra SKIP;
{acquire} [%map], 128;
{LOAD} [%to], [%map, {{{START[0]}, {START[1]}}}], [%bar];
{forms._wait(0)}
SKIP:
bar.sync 0;
{forms.FROM_SHARED}"""
    loaded = [*forms.words_of(box.load(tensor).tobytes()), *[0] * 64][:64]
    scratch = [*[0] * forms.TENSOR_AT, *forms.words_of(tensor.tobytes())]
    scratch += [0] * (MAP_AT + BYTES // 8 - len(scratch))
    outputs = [(64, loaded[::2]), (64, loaded[1::2])]
    rank = 3 if field == "rank" else 2
    yield Case(forms.case_name(form), opcode, body, [], outputs, scratch=scratch, tensor_map=forms._tensor_map(rank))
