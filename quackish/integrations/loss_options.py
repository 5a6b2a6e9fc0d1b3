"""The check of linear cross entropy's options that the integrations share."""

from typing import Any

import quackish


def check_loss_options(who: str, **options: Any) -> None:
    """Raises TypeError or ValueError, in the name of `who`, if linear cross entropy refuses an option."""
    try:
        quackish.LinearCrossEntropyLoss(1, 1, device="meta", **options)  # without random numbers
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("LinearCrossEntropyLoss", who, 1)) from None
