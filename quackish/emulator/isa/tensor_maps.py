"""Instructions that change tensor maps, and the fences between such a change and copies. (PTX: tensormap.replace)

Copies that use a map in global memory must come after a fence that acquires its last change.
"""

import numpy as np

from quackish.emulator import tensor_map
from quackish.emulator.errors import Fault
from quackish.emulator.isa import action
from quackish.emulator.isa.data_movement import offsets_in_cta

ALIGNMENT = 128  # "addr ... 128-byte aligned" (PTX, tensormap.replace: b1024)


def _check_alignment(address):
    if address % ALIGNMENT:
        raise Fault("misaligned", f"a tensor map at {address:#x}, which is not a multiple of {ALIGNMENT}")


def _change_in_global(lanes, address):
    """The bytes of a map in global memory, which the executing thread writes."""
    _check_alignment(address)
    memory, where = lanes.cta.grid.memory, np.array([address], np.uint64)
    tensor, size = memory.tensor_at(where, tensor_map.BYTES), tensor_map.BYTES
    memory.races.write(tensor, where, size, slice(None), lambda: np.ones(len(where), np.bool_))
    lanes.cta.grid.num_events += 1
    lanes.cta.grid.changed_tensor_maps[address] = lanes.cta.grid.num_events
    return memory.bytes_at(address, tensor_map.BYTES)


def check_acquired(cta, address):
    """Raises Fault if a map in global memory has changed, and no thread of the CTA has acquired the change."""
    # "fence.proxy.tensormap ... establishes ordering between memory accesses that may happen through the generic proxy
    # and the tensormap proxy" (PTX, fence)
    changed = cta.grid.changed_tensor_maps.get(address)
    if changed is not None and cta.acquired_tensor_maps.get(address) != changed:
        raise Fault(
            "tensor-map-fence",
            f"a copy by the tensor map at {address:#x}, which was changed, and {cta} has not executed "
            "fence.proxy.tensormap::generic.acquire on it since",
        )


def _one_by_one(lanes, *columns):
    """Yields (the Lanes of a thread, its values) for each thread; meanwhile it is the one that executes."""
    grid = lanes.cta.grid
    for thread, *values in zip(lanes.threads.tolist(), *(column.tolist() for column in columns), strict=True):
        grid.executing = lanes.cta.lanes(1 << thread)
        yield grid.executing, *values
    grid.executing = lanes


def _declare_replace(field, type_, with_ordinal, constant):
    value = "immediate" if constant else type_.replace("b", "u")
    operands = f"{'immediate, ' if with_ordinal else ''}{value}"

    def replace(lanes, data_of, addresses, operands):
        ordinal, value = operands if with_ordinal else (0, *operands)
        values = np.full(lanes.count, value) if constant else value
        for one, address, new in _one_by_one(lanes, addresses, values):
            tensor_map.replace(data_of(one, address), field, ordinal, new)

    @action(f"tensormap.replace.tile.{field}.global.b1024.{type_}", f"[u64], {operands}")
    def in_global(lanes, addresses, *operands):
        replace(lanes, _change_in_global, addresses, operands)

    @action(f"tensormap.replace.tile.{field}.shared::cta.b1024.{type_}", f"[u32], {operands}")
    def in_shared(lanes, addresses, *operands):
        def data_of(one, offset):
            _check_alignment(offset)
            one.cta.shared.races.write(np.array([offset], np.uint32), tensor_map.BYTES)
            return one.cta.shared.bytes_at(offset, tensor_map.BYTES)

        replace(lanes, data_of, offsets_in_cta(lanes, addresses), operands)


_declare_replace("global_address", "b64", with_ordinal=False, constant=False)
_declare_replace("rank", "b32", with_ordinal=False, constant=False)
for _field, _type in (("box_dim", "b32"), ("global_dim", "b32"), ("global_stride", "b64"), ("element_stride", "b32")):
    _declare_replace(_field, _type, with_ordinal=True, constant=False)
for _field in ("elemtype", "interleave_layout", "swizzle_mode", "swizzle_atomicity", "fill_mode"):
    _declare_replace(_field, "b32", with_ordinal=False, constant=True)


def _check_size(size):
    if size != tensor_map.BYTES:  # "The only supported value for the size operand is 128" (PTX)
        raise Fault("tensor-map", f"a tensor map of {size} bytes; it has {tensor_map.BYTES}")


@action(
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.{cta,cluster,gpu,sys}.sync.aligned",
    "[u64], [u32], immediate",
    converged="warp",
)
def copy_to_global(lanes, destinations, sources, size):
    """Copies a map from shared memory, once for each warp."""
    _check_size(size)
    offsets = offsets_in_cta(lanes, sources)
    copies = sorted(
        {(address, offset) for address, offset in zip(destinations.tolist(), offsets.tolist(), strict=True)}
    )
    for address, offset in copies:
        _check_alignment(offset)
        lanes.cta.grid.executing = lanes.cta.lanes(1 << int(lanes.threads[0]))
        lanes.cta.shared.races.read(np.array([offset], np.uint32), tensor_map.BYTES)
        data = lanes.cta.shared.bytes_at(offset, tensor_map.BYTES)
        _change_in_global(lanes, address)[:] = data
    lanes.cta.grid.executing = lanes


@action("fence.proxy.tensormap::generic.acquire.{cta,cluster,gpu,sys}", "[u64], immediate")
def acquire(lanes, addresses, size):
    _check_size(size)
    lanes.cta.grid.races.fence(lanes, "fence.acq_rel")
    for address in addresses.tolist():
        changed = lanes.cta.grid.changed_tensor_maps.get(address)
        if changed is not None:
            lanes.cta.acquired_tensor_maps[address] = changed


@action("fence.proxy.tensormap::generic.release.{cta,cluster,gpu,sys}", "")
def release(lanes):
    lanes.cta.grid.races.fence(lanes, "fence.acq_rel")
