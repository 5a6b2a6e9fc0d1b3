"""The commands of `python -m quackish`, a file each: `add_arguments(parser)` and `run(args) -> exit status`.

A file's docstring is the command's help. Only the chosen command's file is imported, so what one needs costs the
others nothing; packages of an extra are imported inside functions.
"""
