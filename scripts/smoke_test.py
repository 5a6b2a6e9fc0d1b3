"""Tests an installed quackish without its repository: python smoke_test.py VERSION. scripts/release.sh runs it."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import quackish


def main(version: str) -> None:
    assert quackish.__version__ == version, f"quackish {quackish.__version__} is installed; expected {version}"
    assert Path(sys.prefix) in Path(quackish.__file__).parents, f"{quackish.__file__} is not in {sys.prefix}"

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    x, norm, head = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype, requires_grad=True)
        for shape in ((256, 64), (64,), (512, 64))
    )
    target = torch.randint(512, (256,), generator=generator, device=device)

    ours = quackish.linear_cross_entropy(quackish.rms_norm(x, norm), head, target)
    theirs = F.cross_entropy(F.linear(F.rms_norm(x, (64,), norm), head).float(), target)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    leaves = (x, norm, head)
    for got, want in zip(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        error = (got - want).float().norm() / want.float().norm()
        assert error < tolerance, f"a gradient differs by {error:.2g} from PyTorch's; expected less than {tolerance}"
    print(f"quackish {version} on {device}: loss {ours.item():.4f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("smoke_test.py: expected the version that is installed, such as 0.1.0")
    main(sys.argv[1])
