"""How rows are split over the CTAs of a cluster. Without the DSL: problems use it too."""


def columns_per_cta(n: int, vec: int, split_n: int) -> int:
    """Columns per CTA of a row split over split_n CTAs; the last CTA may have fewer."""
    unit = 8 if vec > 1 and split_n > 1 else 1  # aligns each CTA's part to 16 bytes in any dtype
    return -(-n // (split_n * unit)) * unit
