"""Instructions by which the threads of a warp work together."""

import functools

import numpy as np

from quackish.emulator import numbers
from quackish.emulator.errors import Fault
from quackish.emulator.isa import action
from quackish.emulator.threads import WARP

_LANES = np.arange(WARP)


def _spread(lanes, values):
    """Returns values of the executing threads as (warps, 32), and which are present: None if all are.

    Absent values are poison.
    """
    first, end = lanes.span.start // WARP * WARP, -(-lanes.span.stop // WARP) * WARP
    if lanes.count == end - first:
        return values.reshape(-1, WARP), None
    spread = np.full(end - first, -1).astype(values.dtype)
    present = np.zeros(end - first, np.bool_)
    spread[lanes.threads - first] = values
    present[lanes.threads - first] = True
    return spread.reshape(-1, WARP), present.reshape(-1, WARP)


def _gather(lanes, values):
    """The inverse of `_spread`."""
    values = np.ascontiguousarray(values).reshape(-1)
    if lanes.count == len(values):
        return values
    return values[lanes.threads - lanes.span.start // WARP * WARP]


def _check_members(lanes, members):
    # "The behavior [...] is undefined if the executing thread is not in the membermask." (PTX, shfl.sync and others)
    inside = members >> (lanes.threads % WARP).astype(np.uint32) & np.uint32(1)
    if not inside.all():
        raise Fault("member-mask", "a thread is not in the member mask of the instruction that it executes")


def _declare_shuffle(mode):
    @action(f"shfl.sync.{mode}.b32", "b32|pred = b32, u32, u32, u32", converged="members")
    def shuffle(lanes, a, b, c, members):
        _check_members(lanes, members)
        values, _ = _spread(lanes, a)
        distance, _ = _spread(lanes, b)
        control, _ = _spread(lanes, c)
        # c: bits 0-4 clamp the source lane, bits 8-12 split the warp into segments
        segments, clamp = (control >> 8 & 31).astype(np.intp), (control & 31).astype(np.intp)
        offset = (distance & 31).astype(np.intp)
        least, most = _LANES & segments, _LANES & segments | clamp & ~segments
        if mode == "up":
            source = _LANES - offset
            valid = source >= most
        elif mode == "down":
            source = _LANES + offset
            valid = source <= most
        elif mode == "bfly":
            source = _LANES ^ offset
            valid = source <= most
        else:
            source = least | offset & ~segments
            valid = source <= most
        source = np.where(valid, source, _LANES)
        return _gather(lanes, np.take_along_axis(values, source, 1)), _gather(lanes, valid)


for _mode in ("up", "down", "bfly", "idx"):
    _declare_shuffle(_mode)


def _declare_redux(name, type_, reduce, identity):
    """Declares redux.sync. identity: a value that changes no result, for threads that take no part."""

    @action(f"redux.sync.{name}.{type_}", f"{type_} = {type_}, u32", converged="members")
    def redux(lanes, a, members):
        _check_members(lanes, members)
        values, present = _spread(lanes, a)
        if present is not None:
            values = np.where(present, values, values.dtype.type(identity))
        result = reduce(values, axis=1, dtype=values.dtype) if name == "add" else reduce(values, axis=1)
        return _gather(lanes, np.repeat(result, WARP))


for _type, _info in (("u32", np.iinfo(np.uint32)), ("s32", np.iinfo(np.int32))):
    _declare_redux("add", _type, np.sum, 0)
    _declare_redux("min", _type, np.min, _info.max)
    _declare_redux("max", _type, np.max, _info.min)


def _declare_logical_redux(name, reduce, identity):
    @action(f"redux.sync.{name}.b32", "b32 = b32, u32", converged="members")
    def redux(lanes, a, members):
        _check_members(lanes, members)
        values, present = _spread(lanes, a)
        if present is not None:
            values = np.where(present, values, np.uint32(identity))
        return _gather(lanes, np.repeat(reduce(values, axis=1), WARP))


_declare_logical_redux("and", np.bitwise_and.reduce, 0xFFFFFFFF)
_declare_logical_redux("or", np.bitwise_or.reduce, 0)
_declare_logical_redux("xor", np.bitwise_xor.reduce, 0)


def _declare_float_redux(name, absolute, nan):
    """Declares redux.sync of fp32 (sm_100). As for min and max, NaN gives way to numbers unless there is .NaN."""

    @action(f"redux.sync.{name}{'.abs' if absolute else ''}{'.NaN' if nan else ''}.f32", "f32 = f32, u32", "members")
    def redux(lanes, a, members):
        _check_members(lanes, members)
        values, present = _spread(lanes, np.abs(a) if absolute else a)
        combine = functools.partial(numbers.minimum if name == "min" else numbers.maximum, nan=nan)
        if present is not None:
            first = np.take_along_axis(values, present.argmax(axis=1)[:, None], 1)
            values = np.where(present, values, first)
        result = functools.reduce(combine, values.T)
        return _gather(lanes, np.repeat(result, WARP))


for _name in ("min", "max"):
    for _absolute in (False, True):
        for _nan in (False, True):
            _declare_float_redux(_name, _absolute, _nan)


def _votes(lanes, predicate, otherwise):
    """The predicates as (warps, 32), with `otherwise` for threads that do not vote."""
    values, present = _spread(lanes, predicate)
    return values if present is None else np.where(present, values, otherwise)


@action("vote.sync.ballot.b32", "b32 = pred, u32", converged="members")
def ballot(lanes, predicate, members):
    _check_members(lanes, members)
    packed = np.packbits(_votes(lanes, predicate, False), axis=1, bitorder="little").view(np.uint32)
    return _gather(lanes, np.repeat(packed[:, 0], WARP))


@action("vote.sync.any.pred", "pred = pred, u32", converged="members")
def vote_any(lanes, predicate, members):
    _check_members(lanes, members)
    return _gather(lanes, np.repeat(_votes(lanes, predicate, False).any(axis=1), WARP))


@action("vote.sync.all.pred", "pred = pred, u32", converged="members")
def vote_all(lanes, predicate, members):
    _check_members(lanes, members)
    return _gather(lanes, np.repeat(_votes(lanes, predicate, True).all(axis=1), WARP))


@action("vote.sync.uni.pred", "pred = pred, u32", converged="members")
def vote_uniform(lanes, predicate, members):
    _check_members(lanes, members)
    uniform = _votes(lanes, predicate, False).any(axis=1) == _votes(lanes, predicate, True).all(axis=1)
    return _gather(lanes, np.repeat(uniform, WARP))


@action("elect.sync", "b32|pred = u32", converged="members")
def elect(lanes, members):
    """ "elects one predicated active leader thread [...] deterministically": the first one of each warp."""
    _check_members(lanes, members)
    warps = lanes.threads // WARP
    first = np.r_[True, warps[1:] != warps[:-1]]
    leaders = (lanes.threads[first] % WARP).astype(np.uint32)
    return np.repeat(leaders, np.diff(np.r_[np.flatnonzero(first), lanes.count])), first


@action("bar.warp.sync", "u32", converged="members")
def warp_barrier(lanes, members):
    _check_members(lanes, members)
    # "bar.warp.sync also guarantee memory ordering among threads participating in barrier." (PTX, bar.warp.sync)
    lanes.cta.grid.races.order_warp(lanes)
