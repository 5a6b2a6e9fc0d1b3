"""(kernel, problem, GPU) -> config, and why: the one place that decides how a kernel runs.

First comes what `with quackish.config(...)` forces, then a row of the user's table (`python -m quackish tune` writes
it), then a row of the table that is shipped, then the analytical choice. Nothing here is measured while a program runs:
the same tables give the same configs, and so the same bits.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from quackish.configs import table
from quackish.configs.rules import NAMES, RULES, name_of
from quackish.errors import warn_once
from quackish.gpu import Gpu


class Choice(NamedTuple):
    config: Any
    source: str  # "forced", "user table", "shipped table" or "analytical"
    reason: str  # a sentence


class _Forced(NamedTuple):
    """Compared by identity: two blocks may force the same."""

    changes: dict[str, Any]  # name -> a config, or fields of one


# Increases with every change of what is chosen. Caches of anything that follows from a choice have it in their keys
# (15 ns), read before choosing: then no call finds what was chosen before the change.
epoch = 0
_forced: tuple[_Forced, ...] = ()  # outermost first
_lock = threading.Lock()  # held while either changes


def choose(kernel: str, problem: Any, gpu: Gpu) -> Choice:
    """The config that `problem` runs by on `gpu`; `kernel` is a name of kernels.find().

    Raises UnsupportedError where the kernel does not cover the problem, and ValueError where a forced config is illegal
    for it: nothing has been compiled or launched then.
    """
    choice = tabled(kernel, problem, gpu)
    name, rule = name_of(kernel, problem), RULES[kernel]
    layers = [forced.changes[name] for forced in _forced if name in forced.changes]
    if not layers:
        return choice
    config = choice.config
    try:
        for layer in layers:
            config = dataclasses.replace(config, **layer) if isinstance(layer, dict) else layer
        reason = rule.why_illegal(problem, config, gpu)
    except ValueError as error:  # what a config says of itself
        reason = str(error)
    if reason is not None:
        raise ValueError(f"quackish.config: {name}: {reason}\n  {config}\n  for {problem} on {gpu.name}")
    return Choice(config, "forced", f"with quackish.config({name}=...)")


def tabled(kernel: str, problem: Any, gpu: Gpu) -> Choice:
    """What is chosen where nothing is forced."""
    choice = analytical(kernel, problem, gpu)
    for source, rows in (("user table", table.user()), ("shipped table", table.shipped())):
        row = rows.find(kernel, problem, gpu)
        if row is None:
            continue
        try:
            config = type(choice.config)(**row.config)
            reason = RULES[kernel].why_illegal(problem, config, gpu)
        except (TypeError, ValueError) as error:
            reason = str(error)
        if reason is None:
            return Choice(config, source, f"{row.measured}, in {rows.path}")
        warn_once(f"A row of {rows.path} is not used: {reason}; in {row.config} for {problem}.", RuntimeWarning)
    return choice


def analytical(kernel: str, problem: Any, gpu: Gpu) -> Choice:
    """What is chosen without a table."""
    rule = RULES[kernel]
    return Choice(rule.analytical(problem, gpu), "analytical", f"by the rule in {rule.where}")


# Forcing -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def config(**forced: Any) -> Iterator[None]:
    """Kernels launched inside the block run by these configs.

        with quackish.config(rms_norm_backward=dict(num_stages=4)):
            loss.backward()

    Each name is a kernel: `rms_norm_forward`, `rms_norm_backward`; of linear cross entropy the GEMMs `lce_logits`,
    `lce_dlogits`, `lce_dx` and `lce_dw`, and the kernels between them (`lce_gather`, `lce_rows`, ...). Its value is a
    dict of fields, which replace those of the config that would have been chosen, or a whole config
    (`quackish.configs`). Blocks nest; the inner one's fields go over the outer one's.

    ValueError for what is no kernel, no field or of another type, and at the call of an operation whose problem the
    config is illegal for (it says which field, what it was and what is legal); nothing was launched then. Calls that
    take the portable path are not affected.

    It holds for the whole process, as backward runs in threads of its own: not for two threads that want different
    configs at a time. It goes around calls of compiled code (`torch.compile`), not inside it. A CUDA graph keeps the
    configs that it was captured with. Entering and leaving forget what calls had looked up, so the first calls after
    either take longer; otherwise it costs nothing.
    """
    global _forced
    for name, changes in forced.items():
        _check(name, changes)
    mine = _Forced(forced)
    _change(lambda: _forced + (mine,))
    try:
        yield
    finally:
        _change(lambda: tuple(one for one in _forced if one is not mine))


def _change(forced) -> None:
    global _forced, epoch
    with _lock:
        _forced = forced()
        epoch += 1  # last: who sees the new epoch sees the new configs


def _check(name: str, changes: Any) -> None:
    if name not in NAMES:
        raise ValueError(f"quackish.config: no kernel {name!r}; expected one of {', '.join(NAMES)}")
    config_class = RULES[NAMES[name]].config
    if isinstance(changes, config_class):
        changes = {field.name: getattr(changes, field.name) for field in dataclasses.fields(changes)}
    if not isinstance(changes, dict):
        raise ValueError(
            f"quackish.config: {name} is {_a(type(changes))}; expected a dict of fields, or {_a(config_class)}"
        )
    fields = {field.name: field.type for field in dataclasses.fields(config_class)}
    for field, value in changes.items():
        if field not in fields:
            raise ValueError(f"quackish.config: {name} has no field {field!r}; expected one of {', '.join(fields)}")
        if type(value) is not fields[field]:
            raise ValueError(
                f"quackish.config: {name}: {field} is {value!r}, {_a(type(value))}; expected {_a(fields[field])}"
            )


def _a(kind: type) -> str:
    return f"{'an' if kind is int else 'a'} {kind.__name__}"


# Tables --------------------------------------------------------------------------------------------------------------


def reload() -> None:
    """Reads the tables again at their next use: for a process that wrote one, or was given another folder."""
    global epoch
    with _lock:
        table.forget()
        epoch += 1
