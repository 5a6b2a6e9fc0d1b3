"""Runs the forward of a language model without its logits.

The model's own forward runs with a `WithoutLogits` for `self`. There `self.lm_head(hidden)` gives `Logits`, which
record what the forward does to them, and `self.loss_function(logits, labels, ...)` computes the loss from the hidden
states. So hidden states, auxiliary losses and outputs are the model's, as are the scale and softcap of this call.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quackish.errors import UnsupportedError, a
from quackish.integrations.transformers.sharded_head import from_sharded_head


class Logits:
    """Logits that are not computed: multiplier / divisor * tanh(z / softcap), or * z, where z = lm_head(hidden)."""

    def __init__(self, head: nn.Module, hidden: Tensor, softcap=None, multiplier=1.0, divisor=1.0):
        self.head, self.hidden = head, hidden
        self.softcap, self.multiplier, self.divisor = softcap, multiplier, divisor

    @property
    def logit_scale(self) -> float | None:
        """The factor of softcap * tanh(z / softcap), or of z, as in `linear_cross_entropy`; None if it is 1."""
        scale = self.multiplier / self.divisor
        if self.softcap is not None:
            scale = self.multiplier / (self.divisor * self.softcap)
        return None if scale == 1 else scale

    def __mul__(self, factor):
        _check_number(factor)
        return Logits(self.head, self.hidden, self.softcap, self.multiplier * factor, self.divisor)

    __rmul__ = __mul__

    def __truediv__(self, factor):
        _check_number(factor)
        return Logits(self.head, self.hidden, self.softcap, self.multiplier, self.divisor * factor)

    def tanh(self):
        """Applies tanh, which makes divisor / multiplier the softcap."""
        if self.softcap is not None:
            raise UnsupportedError("the forward applies tanh to logits twice")
        return Logits(self.head, self.hidden, self.divisor / self.multiplier)

    def float(self):
        return self  # losses are computed in fp32

    def to(self, *args, **kwargs):
        return self

    def contiguous(self):
        return self

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.head.out_features))

    def __getattr__(self, name: str):
        raise AttributeError(f"the forward uses logits.{name}, which takes all logits")

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.tanh, torch.nn.functional.tanh) and isinstance(args[0], Logits):
            return args[0].tanh()
        raise UnsupportedError(f"the forward applies {getattr(function, '__name__', function)} to logits")


def _check_number(factor) -> None:
    if not isinstance(factor, (int, float)):
        raise UnsupportedError(f"the forward scales logits by {a(type(factor))}, expected a number")


class HeadWithoutLogits:
    """Stands in for lm_head. A call returns `Logits`."""

    def __init__(self, head: nn.Module):
        self._head = head

    def __call__(self, hidden: Tensor) -> Logits:
        return Logits(self._head, hidden)

    def __getattr__(self, name: str):
        return getattr(self._head, name)


class WithoutLogits:
    """Stands in for a model as `self` of its forward.

    head_name: the attribute that holds the head, which is `lm_head` in most models.
    return_token_accuracy: the forward sets `token_accuracy`.
    """

    def __init__(self, model: nn.Module, head_name: str, return_token_accuracy: bool = False):
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "_head_name", head_name)
        object.__setattr__(self, "_return_token_accuracy", return_token_accuracy)
        object.__setattr__(self, "token_accuracy", None)

    def __getattr__(self, name: str):
        value = getattr(self._model, name)
        return HeadWithoutLogits(value) if name == self._head_name else value

    def __setattr__(self, name: str, value) -> None:
        setattr(self._model, name, value)

    def loss_function(
        self,
        logits: Logits,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: int | float | Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs,
    ) -> Tensor:
        """The loss with the arguments of Transformers' ForCausalLMLoss, which ignores `kwargs` too."""
        if not isinstance(logits, Logits):
            raise UnsupportedError(f"the loss is computed from {a(type(logits))}, expected lm_head's logits")
        hidden, shape, target = logits.hidden, logits.hidden.shape[:-1], shift_labels
        if target is None:  # shift labels instead of hidden states, whose slice would be copied
            target = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
        if target.numel() != shape.numel():
            raise ValueError(f"labels have shape {tuple(target.shape)}, expected {tuple(shape)}, one for each token")
        target = target.to(hidden.device).reshape(shape)
        num_items, divisor = num_items_in_batch, None
        if isinstance(num_items, float):
            num_items = torch.full((), num_items, device=hidden.device)
        elif isinstance(num_items, Tensor):
            num_items = num_items.to(hidden.device)
            if num_items.dim() > 0:  # under DataParallel, which expects a loss of that shape
                num_items, divisor = 1, num_items
        loss = logits.head(
            hidden,
            target=target,
            ignore_index=ignore_index,
            num_items=num_items,
            softcap=logits.softcap,
            logit_scale=logits.logit_scale,
            return_stats=self._return_token_accuracy,
        )
        if self._return_token_accuracy:
            loss, stats = loss
            live = target != ignore_index
            accuracy = ((stats.predicted == target) & live).sum() / live.sum().clamp(min=1)
            object.__setattr__(self, "token_accuracy", accuracy)
        if loss.dim() > 0:
            loss = from_sharded_head(loss)
        return loss if divisor is None else loss / divisor
