"""A callback of Transformers' Trainer that applies quackish, for trainers that a file configures.

callbacks:
  - _target_: quackish.integrations.trainer.QuackishCallback
    schedule: recompute
"""

import inspect

import transformers as hf
from torch import nn

from quackish.errors import refuse_unknown
from quackish.integrations import transformers


class QuackishCallback(hf.TrainerCallback):
    """Patches the model of a Trainer with `quackish.integrations.transformers.apply`, before the model is wrapped.

    In TRL's trainers, `quackish.integrations.trl.apply` replaces the loss, so only the other modules are patched.
    A reference model is not patched, nor is a model that `model_init` builds when training begins: call `apply` there.

    options: options of `quackish.integrations.transformers.apply`. Building the Trainer raises its errors.
    """

    def __init__(self, **options):
        refuse_unknown("QuackishCallback", options, list(inspect.signature(transformers.apply).parameters)[1:])
        self.options = options

    def on_init_end(self, args: hf.TrainingArguments, state, control, *, model: nn.Module, **others) -> None:
        options = dict(self.options)
        if any(base.__module__.startswith("trl.") for base in type(args).__mro__):
            from quackish.integrations import trl

            of_loss = {
                name: options.pop(name) for name in ("schedule", "chunk_size", "memory_limit") if name in options
            }
            if options.pop("head", True):
                trl.apply(**of_loss)
            if not (any(options.get(name, True) for name in ("norms", "mlp", "rotary")) or options.get("experts")):
                return
            options["head"] = False
        transformers.apply(model, **options)
