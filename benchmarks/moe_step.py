"""A training step of OLMoE in Transformers: plain, with quackish's norms and head, and with its experts too.

    python -m benchmarks.moe_step                      writes results/<GPU>/moe_step.md
    python -m benchmarks.moe_step --tiny               a tiny model on the CPU, to test this program

Sizes of OLMoE-1B-7B with 4 of its 16 layers; otherwise measured as in llama_step.py.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, OlmoeConfig

from benchmarks import harness
from benchmarks.llama_step import Step, sharing_weights
from quackish.bench.environment import environment, version
from quackish.bench.report import markdown_table
from quackish.integrations.transformers import apply
from quackish.testing.timing import bursts

OLMOE = dict(vocab_size=50304, hidden_size=2048, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=16)
OLMOE |= dict(num_experts=64, num_experts_per_tok=8)
TINY = dict(vocab_size=256, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)

PROVIDERS = {
    "plain": lambda model: None,
    "apply(model)": apply,
    "apply(model, experts=True)": lambda model: apply(model, experts=True),
}


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the page."""
    parser = harness.arguments("moe_step", __doc__, csv=False)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, the default without a GPU")
    args = parser.parse_args(argv)
    device = torch.device("cpu") if args.tiny else harness.device_to_measure()
    on_gpu = device.type == "cuda"
    torch.manual_seed(0)
    with device:
        config = OlmoeConfig(**OLMOE | ({} if on_gpu else TINY))
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        ids = torch.randint(config.vocab_size, (8, 2048) if on_gpu else (2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    steps = {name: Step(sharing_weights(model), optimizer, ids) for name in PROVIDERS}
    for name, step in steps.items():
        PROVIDERS[name](step.model)
        step.warm_up()
        print(f"{name}: {step.peak / 1e9:.2f} GB; {step.columns}", flush=True)
    times = bursts(steps, device, *((5, 0.5) if on_gpu else (1, 0.01)))

    about = environment(device, args.commit)
    page = f"# A training step of OLMoE, {config.num_hidden_layers} layers, on {about['gpu']}\n\n"
    page += f"Commit `{about['commit']}`, driver {about['driver']}, torch {about['torch']}, transformers "
    page += f"{version('transformers')}. {ids.numel()} tokens. The peak includes weights and optimizer.\n\n"
    rows = [
        (name, f"{times[name].median / 1e3:.4g}", f"{step.peak / 1e9:.2f}", *step.columns.values())
        for name, step in steps.items()
    ]
    path = args.out / ("moe_step.md" if on_gpu else "moe_step_tiny.md")
    harness.write_page(page + markdown_table(("provider", "ms", "peak GB", "loss", "grad norm"), rows), path)
    return path


if __name__ == "__main__":
    harness.main(main)
