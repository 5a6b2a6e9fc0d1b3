"""What of a model is patched, what is not, and why."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from quackish.integrations.transformers import experts, head, norms
from quackish.integrations.transformers.subclass import is_patched

Kind = Literal["norm", "loss", "experts"]


@dataclass(frozen=True)
class Entry:
    """A module that quackish patched, could patch, or cannot patch."""

    name: str  # as in model.named_modules()
    module: nn.Module
    kind: Kind
    reason: str = ""  # why it cannot be patched

    @property
    def is_patched(self) -> bool:
        return is_patched(self.module)

    @property
    def is_expected(self) -> bool:
        """False for LayerNorms and the like, which quackish has no function for."""
        return self.kind != "norm" or "RMSNorm" in type(self.module).__name__


class Report(list[Entry]):
    """What `report` returns: a list of `Entry`. Printed, it has one line for each class and reason."""

    @property
    def patched(self) -> list[Entry]:
        return [entry for entry in self if entry.is_patched]

    @property
    def left(self) -> list[Entry]:
        return [entry for entry in self if not entry.is_patched]

    def __str__(self) -> str:
        groups: dict[tuple, list[Entry]] = {}
        for entry in self:
            state = "patched" if entry.is_patched else entry.reason or "not patched; apply(model) can"
            groups.setdefault((entry.kind, type(entry.module).__name__, state), []).append(entry)
        lines = []
        for (kind, name, state), entries in groups.items():
            where = entries[0].name or "the model"
            more = f" and {len(entries) - 1} more" if len(entries) > 1 else ""
            lines.append(f"{kind}: {name} ({where}{more}): {state}")
        return "\n".join(lines)


def report(model: nn.Module) -> Report:
    """Lists the norms, losses and experts of a model: patched ones, and the others with a reason. Print it.

    Works before `apply` too. Changes nothing. After FSDP shards the model, only patched modules are examined in full.
    """
    return Report(examine(model))


def examine(model: nn.Module, kinds: Sequence[Kind] = ("norm", "loss", "experts")) -> Iterator[Entry]:
    """An entry for each norm and each module of experts, and one for the loss."""
    for name, module in model.named_modules():
        if "norm" in kinds and norms.is_norm(module):
            formula = None if is_patched(module) else norms.formula_of(module)
            yield Entry(name, module, "norm", formula if isinstance(formula, str) else "")
        if "experts" in kinds and experts.is_experts(module):
            yield Entry(name, module, "experts", "" if is_patched(module) else experts.why_unsupported(module))
    if "loss" in kinds:
        whole = head.base_model(model)
        name = next(name for name, module in model.named_modules() if module is whole)
        yield Entry(name, whole, "loss", "" if is_patched(whole) else head.why_unsupported(whole))
