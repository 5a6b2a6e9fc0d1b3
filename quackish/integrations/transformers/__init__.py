"""quackish's RMSNorm, linear cross entropy, MLP, rotary embeddings and experts in Hugging Face Transformers.

    from quackish.integrations.transformers import apply

    apply(model)

A module is patched if a trial shows that quackish computes the same: trial.py builds a small copy of it, and norms.py,
head.py, mlps.py, rotaries.py and experts.py compare results and gradients. docs/guides/transformers.md says what runs
when. `register_attention` adds an attention implementation, which needs no patch.
"""

from quackish.integrations.transformers.attention import register_attention as register_attention
from quackish.integrations.transformers.patching import applied as applied
from quackish.integrations.transformers.patching import apply as apply
from quackish.integrations.transformers.patching import revert as revert
from quackish.integrations.transformers.reports import Entry as Entry
from quackish.integrations.transformers.reports import Report as Report
from quackish.integrations.transformers.reports import report as report
