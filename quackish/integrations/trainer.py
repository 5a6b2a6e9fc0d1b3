"""A callback of Transformers' Trainer that applies quackish, for trainers that are configured by a file.

    callbacks:
      - _target_: quackish.integrations.trainer.QuackishCallback
        schedule: recompute
"""

from torch import nn
from transformers import TrainerCallback, TrainingArguments

from quackish.integrations import transformers


class QuackishCallback(TrainerCallback):
    """Patches a Trainer's model as `quackish.integrations.transformers.apply` does, before it is wrapped.

    In TRL's trainers, `quackish.integrations.trl.apply` replaces the loss, and only norms and experts of the model are
    patched. A model that `model_init` builds anew is patched when training begins, which FSDP does not allow.

    options: of `quackish.integrations.transformers.apply`, which also names the errors.
    """

    def __init__(self, **options):
        self.options = options

    def on_init_end(self, args: TrainingArguments, state, control, model: nn.Module | None = None, **kwargs) -> None:
        options = self.options
        if any(base.__module__.startswith("trl.") for base in type(args).__mro__):
            from quackish.integrations import trl

            names = ("schedule", "chunk_size", "memory_limit")
            if options.get("head", True):
                trl.apply(**{name: options[name] for name in names if name in options})
            options = {**options, "head": False}
            if not (options.get("norms", True) or options.get("experts", False)):
                return
        transformers.apply(model, **options)

    def on_train_begin(self, args: TrainingArguments, state, control, model: nn.Module | None = None, **kwargs) -> None:
        if args.train_batch_size and not transformers.is_applied(model):
            self.on_init_end(args, state, control, model)
