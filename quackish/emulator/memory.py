"""Global memory (regions of host memory), shared memory and the windows of generic addresses."""

import bisect
import ctypes
import functools
import gc
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from quackish.emulator.errors import Fault

# Generic addresses: global memory has the host's addresses, other state spaces have windows that no host address is in.
SHARED_WINDOW = 1 << 60
PARAMETER_WINDOW = 1 << 61
LOCAL_WINDOW = 1 << 59
CONSTANT_WINDOW = 1 << 58  # initialized variables of the module, each at a multiple of 2^32

SYSTEM_SHARED_BYTES = 1024  # the system's part of a CTA's shared memory, at its beginning
RANK_SHIFT = 24  # an address of shared::cluster is the CTA's rank in the cluster and an offset
OFFSET_MASK = (1 << RANK_SHIFT) - 1

POISON = 0xFF  # every byte of shared memory and registers before it is written: NaN as a float, -1 as an integer

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_STEPS = {count: np.arange(count) for count in (1, 2, 4, 8)}


class GlobalMemory:
    """The regions of host memory that a launch may access, and the bytes it requested.

    `find_regions(None)` returns (address, bytes) pairs of what is known. Before an access elsewhere is reported,
    `find_regions(0)`, (1) and (2) look for more.
    """

    def __init__(self, find_regions: Callable, find_names: Callable[[], Iterable[tuple[str, int]]] = tuple):
        """find_names: returns (name, address) of the launch's arguments"""
        self._find_regions, self._find_names = find_regions, find_names
        self.bytes_read = self.bytes_written = 0
        self.races: Any = None  # global_races.GlobalRaces: told of the accesses that instructions make here
        self._set(find_regions(None))

    def _set(self, regions: Iterable[tuple[int, int]]) -> None:
        """Replaces the known regions."""
        self._bases: list[int] = []
        self._ends: list[int] = []
        self._views: list[dict[int, np.ndarray]] = []
        for base, size in sorted(regions):
            self._bases.append(base)
            self._ends.append(base + size)
            self._views.append({})

    def _index(self, low: int, high: int) -> int:
        """The region that has the bytes from `low` to `high`. Raises Fault if none has."""
        found = self._lookup(low, high)
        for generation in range(3):
            if found < 0:
                self._set(self._find_regions(generation))
                found = self._lookup(low, high)
        if found < 0:
            where, tensor = self._nearest(low)
            raise Fault(
                "out-of-bounds",
                f"access of global memory at [{low:#x}, {high:#x}), outside every tensor{where}",
                tensor=tensor,
            )
        return found

    def _lookup(self, low: int, high: int) -> int:
        """The known region that has the bytes from `low` to `high`; -1 if none has."""
        found = bisect.bisect_right(self._bases, low) - 1
        return found if found >= 0 and high <= self._ends[found] else -1

    def name_of(self, base: int, size: int) -> str:
        """The names of the arguments in a region, as far as they are known."""
        return ", ".join(name for name, address in self._find_names() if base <= address < base + size)

    def _nearest(self, address: int) -> tuple[str, str]:
        """Where the nearest tensor is, and its name, for a Fault."""
        if not self._bases:
            return ": no tensor is known", ""
        nearest = min(
            range(len(self._bases)),
            key=lambda i: max(self._bases[i] - address, address - self._ends[i] + 1, 0),
        )
        base, end = self._bases[nearest], self._ends[nearest]
        where = f", at byte {address - base} of the nearest one, which has {end - base} bytes"
        if address < base:
            where = f", {base - address} bytes before the nearest one of {end - base} bytes"
        return where, self.name_of(base, end - base)

    def _tensor(self, region: int) -> tuple[int, int]:
        """Returns (address, bytes) of a region."""
        return self._bases[region], self._ends[region] - self._bases[region]

    def tensor_at(self, addresses: np.ndarray, size: int) -> tuple[int, int]:
        """Returns (address, bytes) of the region that has `size` bytes after each address."""
        return self._tensor(self._index(int(addresses.min()), int(addresses.max()) + size))

    def _view(self, region: int, width: int) -> np.ndarray:
        """A region as words of `width` bytes, without a copy."""
        views = self._views[region]
        if width not in views:
            base, size = self._bases[region], self._ends[region] - self._bases[region]
            host = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base))
            views[width] = host[: size // width * width].view(_UNSIGNED[width])
        return views[width]

    def _located(self, addresses: np.ndarray, width: int, size: int):
        """Yields (which addresses, view, indices, region) for each region; each access has `size` bytes."""
        low, high = int(addresses.min()), int(addresses.max()) + size
        region = self._lookup(low, high)
        if region >= 0:
            yield slice(None), self._view(region, width), self._indices(addresses, region, width), region
            return
        regions = np.array([self._index(address, address + size) for address in addresses.tolist()])
        for region in np.unique(regions).tolist():
            threads = np.flatnonzero(regions == region)
            yield threads, self._view(region, width), self._indices(addresses[threads], region, width), region

    def _indices(self, addresses: np.ndarray, region: int, width: int) -> np.ndarray:
        """The indices of addresses in a region's view of this width."""
        offsets = addresses - np.uint64(self._bases[region])
        if self._bases[region] % width:
            raise Fault(
                "misaligned", f"a tensor at {self._bases[region]:#x} is not aligned to its elements of {width} bytes"
            )
        return (offsets // np.uint64(width)).astype(np.intp)

    def load(self, addresses: np.ndarray, width: int, count: int, counted: bool = True) -> np.ndarray:
        """`count` elements of `width` bytes for each address: an unsigned array (addresses, count)."""
        _check_alignment(addresses, width * count, "global")
        values = np.empty((len(addresses), count), _UNSIGNED[width])
        for threads, view, indices, region in self._located(addresses, width, width * count):
            self.races.read(self._tensor(region), addresses, width * count, threads)
            values[threads] = view[indices[:, None] + _STEPS[count]]
        if counted:
            self.bytes_read += values.nbytes
        return values

    def announce_read(self, addresses: np.ndarray, size: int, chosen: np.ndarray) -> None:
        """Tells `races` that the chosen ones of the threads that execute read `size` bytes, perhaps later."""
        indices = np.flatnonzero(chosen)
        if indices.size:
            for which, _, _, region in self._located(addresses[indices], 1, size):
                self.races.read(self._tensor(region), addresses, size, indices[which])

    def store(self, addresses: np.ndarray, values: list[np.ndarray]) -> None:
        """Stores values[i] at the i-th element after each address."""
        width = values[0].dtype.itemsize
        _check_alignment(addresses, width * len(values), "global")
        if len(values) == 1:
            self.races.store_word(addresses, values[0])
        for threads, view, indices, region in self._located(addresses, width, width * len(values)):
            changes = functools.partial(_changes, view, indices, values, threads)
            self.races.write(self._tensor(region), addresses, width * len(values), threads, changes)
            for i, value in enumerate(values):
                view[indices + i] = value[threads]
        self.bytes_written += len(addresses) * width * len(values)

    def read_rows(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """`size` bytes after each address, as an array of bytes (addresses, size)."""
        width = _widest(addresses, size)
        rows = np.empty((len(addresses), size // width), _UNSIGNED[width])
        for which, view, indices, _ in self._located(addresses, width, size):
            rows[which] = view[indices[:, None] + np.arange(size // width)]
        self.bytes_read += rows.nbytes
        return rows.view(np.uint8)

    def write_rows(self, addresses: np.ndarray, rows: np.ndarray) -> None:
        """Writes the bytes of each row after its address."""
        width = _widest(addresses, rows.shape[1])
        words = np.ascontiguousarray(rows).view(_UNSIGNED[width])
        for which, view, indices, _ in self._located(addresses, width, rows.shape[1]):
            view[indices[:, None] + np.arange(words.shape[1])] = words[which]
        self.bytes_written += rows.nbytes

    def bytes_at(self, address: int, size: int) -> np.ndarray:
        """The bytes themselves, to read or to write. The caller counts."""
        region = self._index(address, address + size)
        offset = address - self._bases[region]
        return self._view(region, 1)[offset : offset + size]


def _changes(view: np.ndarray, indices: np.ndarray, values: list[np.ndarray], threads: Any) -> np.ndarray:
    """Which threads would change memory by storing values[i] at indices + i."""
    return np.any([view[indices + i] != value[threads] for i, value in enumerate(values)], axis=0)


def _widest(addresses: np.ndarray, size: int) -> int:
    """The widest words that accesses of `size` bytes at these addresses consist of."""
    bits = int(np.bitwise_or.reduce(addresses)) | size | 8
    return bits & -bits


def _check_alignment(addresses: np.ndarray, size: int, space: str) -> None:
    # "If an address is not properly aligned, the resulting behavior is undefined." Vector accesses are aligned to the
    # whole vector. (PTX, ld and Vectors)
    if size > 1:
        misaligned = (addresses & addresses.dtype.type(size - 1)) != 0
        if misaligned.any():
            address = int(addresses[misaligned][0])
            raise Fault("misaligned", f"misaligned access of {size} bytes of {space} memory at {address:#x}")


class SharedMemory:
    """The shared memory of one CTA. Offsets count from the beginning of its window."""

    def __init__(self, size: int):
        self.size = SYSTEM_SHARED_BYTES + size
        self.bytes = np.full(-(-self.size // 16) * 16, POISON, np.uint8)
        self.views = {width: self.bytes.view(dtype) for width, dtype in _UNSIGNED.items()}
        self.races: Any = None  # races.SharedRaces: told of the accesses that instructions make here
        self._mbarriers = np.zeros(len(self.bytes) // 8, np.bool_)  # which words of 8 bytes are mbarriers
        self._mbarriers_begin, self._mbarriers_end = self.size, 0  # no mbarrier is outside of these bytes

    def check(self, low: int, high: int) -> None:
        """Raises Fault unless the CTA has the bytes from `low` to `high`."""
        if low < SYSTEM_SHARED_BYTES or high > self.size:
            raise Fault(
                "out-of-bounds",
                f"access of shared memory at [{low:#x}, {high:#x}); "
                f"the CTA has [{SYSTEM_SHARED_BYTES:#x}, {self.size:#x})",
            )

    def set_mbarrier(self, offset: int, is_live: bool) -> None:
        """Records that an mbarrier begins or ends to be at an offset."""
        self._mbarriers[offset // 8] = is_live
        self._mbarriers_begin = min(self._mbarriers_begin, offset)
        self._mbarriers_end = max(self._mbarriers_end, offset + 8)

    def check_bytes(self, low: int, high: int) -> None:
        """As `check`, and raises Fault if any of the bytes is in an mbarrier."""
        self.check(low, high)
        if low < self._mbarriers_end and high > self._mbarriers_begin:
            self._check_words(np.arange(low // 8, -(-high // 8)))

    def _check_words(self, words: np.ndarray) -> None:
        # "Performing any non-mbarrier or mbarrier.init operations on an initialized mbarrier object results in
        # undefined behavior." (PTX, mbarrier)
        found = words[self._mbarriers[words]]
        if found.size:
            raise Fault(
                "mbarrier-memory",
                f"an access of shared memory at {8 * int(found[0]):#x}, where an initialized mbarrier is",
                advice="mbarrier.inval must come first, or the mbarrier needs memory of its own",
            )

    def _indices(self, offsets: np.ndarray, width: int, count: int) -> np.ndarray:
        """The indices of words. Raises Fault for accesses that are not allowed there."""
        size = width * count
        _check_alignment(offsets, size, "shared")
        low, high = int(offsets.min()), int(offsets.max()) + size
        self.check(low, high)
        if low < self._mbarriers_end and high > self._mbarriers_begin:
            self._check_words(offsets // 8)
            if size > 8:
                self._check_words(offsets // 8 + 1)
        return (offsets // offsets.dtype.type(width)).astype(np.intp)

    def load(self, offsets: np.ndarray, width: int, count: int) -> np.ndarray:
        """`count` elements of `width` bytes for each offset: an unsigned array (offsets, count)."""
        indices = self._indices(offsets, width, count)
        self.races.read(offsets, width * count)
        return self.views[width][indices[:, None] + _STEPS[count]]

    def store(self, offsets: np.ndarray, values: list[np.ndarray]) -> None:
        """Stores values[i] at the i-th element after each offset."""
        width = values[0].dtype.itemsize
        self._indices(offsets, width, len(values))  # checks them
        self.races.write(offsets, width * len(values))
        self.put(offsets, values)

    def check_atomic(self, offsets: np.ndarray, width: int) -> None:
        """Checks atomic operations on words, and tells `races` of them."""
        self._indices(offsets, width, 1)
        self.races.change(offsets, width)

    def put(self, offsets: np.ndarray, values: list[np.ndarray]) -> None:
        """Stores as `store` does, without telling `races`, which knows of it already."""
        width = values[0].dtype.itemsize
        indices = self._indices(offsets, width, len(values))
        for i, value in enumerate(values):
            self.views[width][indices + i] = value

    def bytes_at(self, offset: int, size: int) -> np.ndarray:
        """The bytes themselves, to read or to write. The caller tells `races`."""
        self.check_bytes(offset, offset + size)
        return self.bytes[offset : offset + size]


class LocalMemory:
    """The memory of each thread of a CTA alone: (threads, bytes), poisoned at first."""

    def __init__(self, num_threads: int, size: int):
        self.bytes = np.full((num_threads, size), POISON, np.uint8)

    def _places(self, threads: np.ndarray, offsets: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The indices of bytes. Raises Fault for accesses that are misaligned or out of bounds."""
        _check_alignment(offsets, size, "local")
        if int(offsets.max()) + size > self.bytes.shape[1]:
            raise Fault(
                "out-of-bounds",
                f"access of local memory at {int(offsets.max()):#x}; a thread has {self.bytes.shape[1]} bytes",
            )
        return threads[:, None], offsets[:, None].astype(np.intp) + np.arange(size)

    def load(self, threads: np.ndarray, offsets: np.ndarray, size: int) -> np.ndarray:
        """`size` bytes of each thread."""
        return self.bytes[self._places(threads, offsets, size)]

    def store(self, threads: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> None:
        """Stores the bytes of a row in each thread's memory."""
        self.bytes[self._places(threads, offsets, rows.shape[1])] = rows


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, type.__subclasses__(kind)))


class HostRegions:
    """Which host memory kernels may access: storages of live CPU tensors, and regions that callers register."""

    def __init__(self):
        self.registered: dict[int, int] = {}  # address -> bytes
        self._storages: dict[int, Any] = {}  # the storage's struct -> weak reference

    def __call__(self, generation: int | None) -> list[tuple[int, int]]:
        """Returns (address, bytes) of all known regions; finds more in a generation of the garbage collector.

        Looking at all objects takes 0.2 s, and nearly all of them are in the oldest generation, 2, where few new
        tensors are.
        """
        import torch

        if generation is not None:
            self._find(generation)
        regions = dict(self.registered)
        for key, reference in list(self._storages.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._storages[key]
            elif storage.data_ptr() and storage.nbytes():
                regions[storage.data_ptr()] = storage.nbytes()
        return list(regions.items())

    def _find(self, generation: int) -> None:
        """Remembers the storages of CPU tensors among the objects of a generation."""
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef

        kinds = _with_subclasses(torch.Tensor)
        for candidate in [candidate for candidate in gc.get_objects(generation) if type(candidate) in kinds]:
            if candidate.device.type == "cpu":
                try:
                    storage = candidate.untyped_storage()
                    storage.data_ptr()
                except (
                    NotImplementedError,
                    RuntimeError,
                ):  # without memory of its own, as torch.compile's fake tensors
                    continue
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = StorageWeakRef(storage)


host_regions = HostRegions()
