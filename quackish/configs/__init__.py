"""Problem and Config dataclasses, and the rules (problem, gpu) -> config. Plain Python: no torch, no DSL."""
