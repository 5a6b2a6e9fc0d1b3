"""(kernel, problem, GPU) -> config: the one place that decides how a kernel runs.

In order of precedence: `with quackish.config(...)`, a row of the user's table (written by `quackish tune`),
the analytical rule. Nothing is measured at run time, so the same table gives the same configs and the same bits.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from quackish.device import tuned
from quackish.device.spec import KernelSpec
from quackish.errors import a, describe, did_you_mean, warn_once
from quackish.gpu import Gpu


class Choice(NamedTuple):
    """A config, and where it comes from."""

    config: Any
    source: str  # "forced", "user table" or "analytical"
    reason: str  # a sentence


# Incremented whenever `choose` may return something else, and when calls get another device (kernel_device.py). Every
# cache that depends on a choice or on a device has it in its key, read before both, so that no call uses outdated ones.
epoch = 0
_forced: tuple[dict[str, Any], ...] = ()  # one per block, outermost first: name -> config, or fields to replace
_lock = threading.Lock()  # guards both


def choose(problem: Any, gpu: Gpu) -> Choice:
    """The config for `problem` on `gpu`.

    Raises UnsupportedError if the kernel does not cover the problem, and ValueError if a forced config is illegal for
    it, before anything is compiled or launched.
    """
    choice, name = unforced(problem, gpu), problem.spec.name_of(problem)
    overrides = [forced[name] for forced in _forced if name in forced]
    if not overrides:
        return choice
    config = choice.config
    for override in overrides:
        if reason := _why_unfit(override, type(config)):
            raise ValueError(f"quackish.config: {name}{reason}\n  for {problem} on {gpu.name}")
        config = dataclasses.replace(config, **override) if isinstance(override, dict) else override
    if reason := problem.spec.variant(gpu).why_illegal(problem, config, gpu):
        raise ValueError(f"quackish.config: {name}: {reason}\n  {config}\n  for {problem} on {gpu.name}")
    return Choice(config, "forced", f"with quackish.config({name}=...)")


def unforced(problem: Any, gpu: Gpu) -> Choice:
    """The choice without `quackish.config`: from the table, else analytical."""
    choice, why_illegal = analytical(problem, gpu), problem.spec.variant(gpu).why_illegal
    row = tuned.find(problem, gpu) if why_illegal else None
    if row is None:
        return choice
    try:
        config = type(choice.config)(**row.config)
        reason = why_illegal(problem, config, gpu)
    except TypeError as error:  # the row has unknown fields or wrong types
        reason = str(error)
    if reason is None:
        return Choice(config, "user table", f"{row.measured}, in {tuned.path()}")
    warn_once(f"A row of {tuned.path()} is not used: {reason}; in {row.config} for {problem}.", RuntimeWarning)
    return choice


def analytical(problem: Any, gpu: Gpu) -> Choice:
    """The choice of the kernel's rule, without `quackish.config` and without the table."""
    rule = problem.spec.variant(gpu).rule
    return Choice(rule(problem, gpu), "analytical", f"by the rule in {rule.__module__.replace('.', '/')}.py")


# Forcing -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def config(**forced: Any) -> Iterator[None]:
    """Forces configs for the kernels launched inside the block.

        with quackish.config(rms_norm_backward=dict(num_stages=4)):
            loss.backward()

    Names are kernels: `rms_norm_forward`, `rms_norm_backward`, linear cross entropy's GEMMs `lce_logits`,
    `lce_dlogits`, `lce_dx` and `lce_dw`, and `grouped_gemm` for all GEMMs of grouped_mlp and grouped_mm. A value is a
    dict of fields to replace in the config that would have been chosen, or a whole config (`quackish.configs`). Blocks
    nest; fields of inner blocks override those of outer ones.

    Raises ValueError for an unknown kernel or field or a wrong type. If a config is illegal for a problem, the call of
    the operation raises ValueError with the field, its value and what is legal, before anything is launched. Calls on
    the portable path are not affected.

    A block applies to the whole process, because backward runs in its own threads; two threads cannot force different
    configs at the same time. Put it around calls of compiled code (`torch.compile`), not inside. A CUDA graph keeps the
    configs it was captured with. The only cost is a new kernel lookup per call after a block starts or ends.
    """
    global _forced
    for name, changes in forced.items():
        _check(name, changes)
    with changing():
        _forced += (forced,)
    try:
        yield
    finally:
        with changing():
            _forced = tuple(block for block in _forced if block is not forced)  # by identity: two blocks may be equal


@contextlib.contextmanager
def changing() -> Iterator[None]:
    """Starts a new epoch at the end of the block. The block changes choices or the device of calls."""
    global epoch
    with _lock:
        yield
        epoch += 1  # after the change, so that a reader of the new epoch gets the new configs


def _by_public_name() -> dict[str, KernelSpec]:
    """The kernels whose configs can be forced, by their names."""
    from quackish import ops  # only here: this layer knows no operation

    return {name: spec for spec in ops.specs().values() if spec.is_tunable for name in spec.public_names}


def _check(name: str, changes: Any) -> None:
    """Raises ValueError for an unknown kernel, or for changes that no config of the kernel takes."""
    known = _by_public_name()
    if name not in known:
        raise ValueError(
            f"quackish.config: no kernel {name!r}; expected one of {', '.join(known)}{did_you_mean(name, known)}"
        )
    classes = dict.fromkeys(variant.config for variant in known[name].on.values())
    reasons = [_why_unfit(changes, config_class) for config_class in classes]
    if all(reasons):  # not for the config of any GPU family
        raise ValueError(f"quackish.config: {name}{reasons[0]}")


def _why_unfit(changes: Any, config_class: type) -> str | None:
    """Why `changes` are no config_class or a dict of its fields, to be read after the kernel's name."""
    if isinstance(changes, config_class):
        changes = {field.name: getattr(changes, field.name) for field in dataclasses.fields(config_class)}
    if not isinstance(changes, dict):
        return f" is {describe(changes)}; expected a dict of fields, or {a(config_class)}"
    fields = {field.name: field.type for field in dataclasses.fields(config_class)}
    for field, value in changes.items():
        if field not in fields:
            return f" has no field {field!r}; expected one of {', '.join(fields)}{did_you_mean(str(field), fields)}"
        if type(value) is not fields[field]:
            return f": {field} is {describe(value)}; expected {a(fields[field])}"
    return None


def reload() -> None:
    """Rereads the table at its next use. Call after writing it or changing the config folder."""
    with changing():
        tuned.rows.cache_clear()
