"""How figures and tables for readers show providers: a title that says what it is, and a color."""

from collections.abc import Iterable

# (title, color). Colors are warm for quackish, with one hue per library.
LOOKS = {
    "quackish": ("ours", "#d1350f"),
    "quackish-stored": ("ours, stored", "#7f1d0a"),
    "quackish-chunked": ("ours, chunked", "#f08a3c"),
    "quackish-recompute": ("ours, recompute", "#c07f00"),
    "quack": ("QuACK", "#0b5fa5"),
    "quack-base": ("QuACK, cuBLAS", "#4aa3df"),
    "quack-logits": ("QuACK, all logits at once", "#1b2a6b"),
    "liger": ("Liger", "#1a7f37"),
    "liger-triton": ("Liger, Triton", "#1a7f37"),  # what "liger" is
    "liger-cute": ("Liger, CuTe", "#6cc24a"),
    "liger-cute-sm90": ("Liger, Hopper kernels", "#00a58e"),
    "liger-fp32": ("Liger, fp32 sums", "#9aa800"),
    "liger-fp32-large": ("Liger, fp32 sums, larger chunks", "#9aa800"),
    "cce": ("cut-cross-entropy", "#a03cb4"),
    "torch": ("PyTorch", "#333333"),
    "torch-compile": ("PyTorch, compiled", "#7a7a7a"),
    "torch-fp32": ("PyTorch, fp32 logits", "#555555"),
    "torch-chunked": ("PyTorch, chunked", "#b0b0b0"),
    "torch-cute": ("PyTorch, its CuTe kernel", "#c0a080"),
    "flex": ("FlexAttention", "#2f7f86"),
    "fa4": ("FlashAttention 4", "#1b2a6b"),
    "transformers": ("Transformers", "#b8860b"),
    "trl": ("TRL", "#b8860b"),
    "sonicmoe": ("SonicMoE", "#6f4e37"),
}
_OTHERS = ("#8c564b", "#e377c2", "#17becf", "#5c4bb5")  # colors of the user's own providers


def _base(name: str) -> tuple[str, str]:
    """Splits a name into the longest part that LOOKS has, or "", and a number of rows or an option."""
    base = name.partition(" ")[0]
    while base not in LOOKS and "-" in base:
        base = base.rpartition("-")[0]
    return (base, name[len(base) :].strip("- ")) if base in LOOKS else ("", name)


def title_of(name: str) -> str:
    """ "QuACK, chunks of 8192 rows" for "quack-8192"; the name itself for a user's own provider."""
    base, rest = _base(name)
    rest = f"chunks of {rest} rows" if rest.isdigit() else rest
    title = LOOKS[base][0].removesuffix(", chunked") if rest.startswith("chunks") else LOOKS[base][0] if base else ""
    return ", ".join(filter(None, (title, rest)))


def color_of(name: str) -> str:
    """The color of a provider. Variants, such as other chunk sizes, have the color of their base."""
    base, _ = _base(name)
    return LOOKS[base][1] if base else _OTHERS[sum(map(ord, name)) % len(_OTHERS)]


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """A color per name. The second and later names of one color get darker shades of it."""
    colors: dict[str, str] = {}
    for name in names:
        color = color_of(name)
        while color in colors.values():
            color = "#" + "".join(f"{int(color[i : i + 2], 16) * 2 // 3:02x}" for i in (1, 3, 5))
        colors[name] = color
    return colors
