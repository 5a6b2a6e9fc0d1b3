"""Shared by the tests of RMSNorm with and without a GPU."""

from quackish.testing.errors import same_bits

# Tensors of shape (2, s, 4, n); `of(*shape)` makes a packed one.
LAYOUTS = {
    "packed": lambda of, s, n: of(2, s, 4, n),
    "slice of qkv": lambda of, s, n: of(2, s, 3, 4, n)[:, :, 1],
    "columns of a matrix": lambda of, s, n: of(8 * s, 3 * n)[:, n : 2 * n].unflatten(0, (2, s, 4)),
    "transposed rows": lambda of, s, n: of(4 * s, 2, n).transpose(0, 1).unflatten(1, (s, 4)),
    "expanded rows": lambda of, s, n: of(1, 1, 4, n).expand(2, s, 4, n),
    "three levels": lambda of, s, n: of(2, 4, s, n).transpose(1, 2),
    "columns first": lambda of, s, n: of(2, s, n, 4).transpose(2, 3),
    "expanded columns": lambda of, s, n: of(2, s, 4, 1).expand(2, s, 4, n),
    "off by one element": lambda of, s, n: of(8 * s * n + 1)[1:].view(2, s, 4, n),
}


def assert_same(a, b):
    assert len(a) == len(b)
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        assert same_bits(one, other), f"result {i}"
