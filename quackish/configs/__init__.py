"""Problem and Config dataclasses, and (problem, gpu) -> config. Plain Python: neither torch nor the DSL."""
