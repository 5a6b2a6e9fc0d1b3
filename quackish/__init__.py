"""CuTe DSL kernels for Hopper and Blackwell, called from PyTorch. Importing starts neither CUDA nor the compiler."""

from quackish.errors import UnsupportedError

__version__ = "0.1.0"

__all__ = ["UnsupportedError", "__version__"]
