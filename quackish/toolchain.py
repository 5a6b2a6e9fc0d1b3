"""What compiles kernels here."""

import functools


@functools.cache
def versions() -> dict[str, str] | None:
    """Of quackish, the DSL and the CUDA that it compiles with; None where the DSL is not installed."""
    try:
        import cutlass
    except ModuleNotFoundError:
        return None

    from quackish import __version__

    cuda = cutlass.CUDA_VERSION  # of the compiler's flavour, which it picks by the driver at hand
    return {"quackish": __version__, "nvidia-cutlass-dsl": cutlass.__version__, "cuda": f"{cuda.major}.{cuda.minor}"}
