"""Forward of a small step as a list of launches, made once; later calls of its kind fill in addresses, nothing else.

What a schedule launches depends on shapes, strides, dtypes, options and configs, on no value. To work it out anew, in
Python, takes the host longer than the GPU needs for a small step: with M 128, H 512 and V 1024 a whole step took the
host 573 us, replayed 346 (beside one H200, in one run; PyTorch 335). What a replayed call does not return is one block
of memory; the small tensors that backward may ask for are another.

To make the list, the schedule runs on tensors without memory, whose addresses tell which tensor they are of, and where
in it. Whatever is neither a launch nor memory makes a call one that is never replayed.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quackish import launch
from quackish.gpu import Gpu
from quackish.ops import cuda
from quackish.ops.linear_cross_entropy_buffers import empty, vector
from quackish.ops.linear_cross_entropy_gemms import GemmLaunches
from quackish.ops.linear_cross_entropy_kernels import LceKernels
from quackish.ops.linear_cross_entropy_schedules import Call, Forward, Grads, Wanted

if TYPE_CHECKING:
    from quackish.ops.linear_cross_entropy_autograd import Plan

RECORDED_AFTER = 8  # calls of a kind: recording takes as long as 27 replays save (a CPU), and shapes may be new
MOST_BYTES = 128 << 20  # that are not returned; around an E of so many, three GEMMs take 0.6 ms with H 1024 on an H200
_MAX_PROGRAMS = 1024  # then they are forgotten, now and then
_ALIGNMENT = 256  # bytes, of tensors in a block

# Recorded addresses: the number of what they are of, and the offset there.
_OFFSET_BITS = 48
_LARGEST = 1 << 40  # of what is no address, neither a recorded nor a real one
_STREAM, _TICKET = 1 << _OFFSET_BITS, 2 << _OFFSET_BITS
_NUM_INPUTS = 6  # the tensors that a Call begins with have the next numbers


def forward(plan: "Plan", k, call: Call, wanted: Wanted, own_dw: bool) -> Forward:
    """What plan.forward returns, by the same launches."""
    programs, x = k.programs, call.x
    if programs is None or x.shape[0] > plan.chunk_rows:  # chunks follow each other so that they need less memory
        return plan.forward(k, call, wanted, own_dw)
    # A number of items may be another one each time, a tensor may have to be converted; rows of x that do not start on
    # 16 bytes take other kernels, and where x lies is not in the key.
    if call.num_items is not None or (x.data_ptr() | x.stride(0) * x.itemsize) & 15:
        return plan.forward(k, call, wanted, own_dw)
    if x.is_cuda and cuda.is_capturing():  # where no two launches share tickets
        return plan.forward(k, call, wanted, own_dw)
    bias_dtype = None if call.bias is None else call.bias.dtype
    weighted = call.class_weight is not None
    key = (plan, x.shape, x.stride(0), call.w.shape, call.target.dtype, bias_dtype, weighted, wanted, own_dw)
    program = programs.get(key, 0)  # or how many calls there were; None: there is none
    if isinstance(program, Program):
        return program.run(k, call)
    if program is not None:
        if program == 0 and len(programs) >= _MAX_PROGRAMS:
            programs.clear()
        programs[key] = program + 1 if program < RECORDED_AFTER else None  # what it stays if recording fails
        if program == RECORDED_AFTER:
            programs[key] = _recorded(plan, k, call, wanted, own_dw)
    return plan.forward(k, call, wanted, own_dw)


class Program:
    """Launches of kernels, and how to make their arguments anew.

    Arguments are picked from a list: addresses, then constants, then tuples, which are picked from those before them.
    Addresses start from a list of bases: stream, ticket, inputs, results, and two blocks of memory.
    """

    def __init__(self, launches: Sequence[tuple[launch.Request, tuple]], made: "Sequence[Place]", out: Forward):
        """`launches` of recorded addresses; `made`: what was allocated meanwhile, in the order of its numbers."""
        outputs = (out.loss, out.lse, *out.grads, out.xc, out.e)
        results = list({t.number: t for t in outputs if t is not None}.values())
        if out.dw is not None or any(t is not made[t.number - made[0].number] for t in results):
            raise NotReplayable("a part of what was allocated is returned")
        # what a run returns: allocated one by one
        numbers = [t.number for t in results]
        self.results = [(tuple(t.shape), t.stride(), t.dtype) for t in results]
        self.outputs = [-1 if t is None else numbers.index(t.number) for t in outputs]
        # the other tensors: in two blocks
        rows = {t.number: name for name, t in zip(out.rows._fields, out.rows, strict=True)}
        self.rows: dict[str, tuple[int, int, torch.dtype]] = {}  # first element in its block, length, dtype
        self.blocks = [0, 0]  # int32 elements: of what backward may ask for, of the rest
        first = made[0].number  # numbers start at 1, bases at 0
        at = {number: (number - 1, 0) for number in range(1, first)}  # number -> base and offset
        for t in made:
            if t.number in numbers:
                at[t.number] = first - 1 + numbers.index(t.number), 0
                continue
            block = 0 if t.number in rows else 1
            start = self.blocks[block]
            at[t.number] = first - 1 + len(results) + block, 4 * start
            self.blocks[block] += -(-t.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT // 4
            if block == 0:
                self.rows[rows[t.number]] = start, t.shape[0], t.dtype
        self._list_arguments(launches, at)

    def _list_arguments(self, launches: Sequence[tuple[launch.Request, tuple]], at: dict[int, tuple[int, int]]) -> None:
        args = [arg for _, given in launches for arg in given]
        tuples = [arg for arg in args if _has_recorded(arg)]
        leaves = [arg for arg in args if not _has_recorded(arg)] + [leaf for group in tuples for leaf in group]
        addresses = list(dict.fromkeys(leaf for leaf in leaves if _is_recorded(leaf)))
        constants = {_typed(leaf): leaf for leaf in leaves if not _is_recorded(leaf)}
        groups = {_typed(group): group for group in tuples}
        index = {key: i for i, key in enumerate([*map(_typed, addresses), *constants, *groups])}

        def picker(group: tuple) -> Callable[[list], tuple]:
            return itemgetter(*(index[_typed(arg)] for arg in group))  # two or more: of one it makes no tuple

        self.addresses = [_moved(leaf, at) for leaf in addresses]
        self.constants = list(constants.values())
        self.tuples = [picker(group) for group in groups.values()]
        self.launches = [(launch.get(*request), picker(given)) for request, given in launches]

    def run(self, k: LceKernels, call: Call) -> Forward:
        stream, ticket, _ = k.stream_and_ticket()
        x = call.x
        results = [empty(x, *how) for how in self.results]
        blocks = [vector(x, n, torch.int32) for n in self.blocks]
        given = [None if t is None else t.data_ptr() for t in call[:_NUM_INPUTS]]
        bases = [stream, ticket, *given, *[t.data_ptr() for t in results + blocks]]
        args = [bases[base] + offset for base, offset in self.addresses]
        args += self.constants
        args += [pick(args) for pick in self.tuples]
        for kernel, pick in self.launches:
            kernel(*pick(args))
        results.append(None)
        loss, lse, dx, dw, db, xc, e = [results[i] for i in self.outputs]
        return Forward(loss, lse, KeptRows(blocks[0], self.rows), Grads(dx, dw, db), xc, e)


class KeptRows:
    """`Rows` in one block of memory, each made when it is asked for: the backward of most steps asks for none."""

    def __init__(self, block: Tensor, parts: dict[str, tuple[int, int, torch.dtype]]):
        self._block, self._parts = block, parts

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or name not in self._parts:
            raise AttributeError(name)
        start, n, dtype = self._parts[name]
        t = self.__dict__[name] = self._block[start : start + n].view(dtype)
        return t


# Recording -----------------------------------------------------------------------------------------------------------


class NotReplayable(Exception):
    """Something but launches and memory was asked for."""


_ALLOCATES = ("new_empty", "new_empty_strided")
_VIEWS = ("__getitem__", "view", "as_strided")
_ASKS = ("__get__", "stride", "dim", "numel", "is_contiguous", "storage_offset", "untyped_storage")  # attributes too


class Place(Tensor):
    """A tensor without memory, or a part of one: its address is its number and the offset in it."""

    number: int
    others: "list[Place | None]"  # by number, from 1

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        name, result = function.__name__, super().__torch_function__(function, types, args, kwargs or {})
        if name in _ALLOCATES:
            return result._numbered(args[0].others)
        if name in _VIEWS:
            result.number, result.others = args[0].number, args[0].others
        elif name not in _ASKS or isinstance(result, Tensor):
            raise NotReplayable(f"torch computes: {name}")
        return result

    @classmethod
    def like(cls, t: Tensor, others: "list[Place | None]") -> "Place":
        blank = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
        return blank.as_subclass(cls)._numbered(others)

    def _numbered(self, others: "list[Place | None]") -> "Place":
        others.append(self)
        self.number, self.others = len(others), others
        return self

    def data_ptr(self) -> int:
        return (self.number << _OFFSET_BITS) + self.storage_offset() * self.itemsize


def _is_recorded(arg: Any) -> bool:
    if isinstance(arg, int):
        if _LARGEST <= arg < _STREAM:
            raise NotReplayable(f"what is at {arg:#x} was there before")
        return arg >= _STREAM
    if arg is not None and not isinstance(arg, (float, tuple)):
        raise NotReplayable(f"a kernel is given {arg!r}")
    return False


def _has_recorded(arg: Any) -> bool:
    return isinstance(arg, tuple) and any(map(_is_recorded, arg))


def _moved(recorded: int, at: dict[int, tuple[int, int]]) -> tuple[int, int]:
    base, start = at[recorded >> _OFFSET_BITS]
    return base, start + recorded % (1 << _OFFSET_BITS)


def _typed(arg: Any) -> tuple:
    """What tells it from others: 1 is equal to 1.0, and they are not the same to a kernel."""
    return (tuple(map(type, arg)) if isinstance(arg, tuple) else type(arg)), arg


class _RecordedGemms(GemmLaunches):
    def __init__(self, device: torch.device, gpu: Gpu):
        super().__init__(device, gpu)
        self.stream = lambda: _STREAM

    def stream_and_ticket(self) -> tuple[int, int, None]:
        return _STREAM, _TICKET, None


def _recorded(plan: "Plan", k: LceKernels, call: Call, wanted: Wanted, own_dw: bool) -> Program | None:
    """None where it cannot be replayed, or need not."""
    if plan.ignore_index >= _LARGEST or call.x.stride(0) >= _LARGEST:  # they would pass for addresses
        return None
    places: list[Place | None] = [None, None]  # by number, from 1: stream and ticket, inputs, what is allocated
    inputs = []
    for t in call[:_NUM_INPUTS]:
        inputs.append(None if t is None else Place.like(t, places))
        if t is None:
            places.append(None)
    recorder = LceKernels(k.device, _RecordedGemms(k.device, k.gpu))
    try:
        with launch.record() as recording, torch._C._EnableTorchFunction():  # which a caller may have disabled
            out = plan.forward(recorder, Call(*inputs, *call[_NUM_INPUTS:]), wanted, own_dw)
        program = Program(recording.launches, places[2 + _NUM_INPUTS :], out)
    except NotReplayable:
        return None
    return program if 4 * sum(program.blocks) <= MOST_BYTES else None
