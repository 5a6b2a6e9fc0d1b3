"""The commands of `quackish`, one file each: `add_arguments(parser)` and `run(args) -> exit status`.

A file's docstring is the command's help. Only the chosen command's file is imported. Packages of the extra `bench` are
imported inside functions.
"""
