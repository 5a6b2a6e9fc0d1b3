"""The list of commands, and their parser."""

import importlib

from quackish._version import __version__
from quackish.cli.parser import Parser, program_name

_ABOUT = "Inspect, measure and tune the kernels of quackish, and manage their cache."
# Kept here so that `--help` imports no command.
COMMANDS = {
    "bench": "time operations and other libraries over shapes",
    "cache": "list, verify or clear compiled kernels",
    "doctor": "check the installation: versions, GPUs, the path and the results of each operation",
    "emulate": "run the kernels of a call on the CPU, and compare with fp64; needs no GPU",
    "explain": "show the kernels, configs, estimated time and memory of a call; needs no GPU",
    "precompile": "compile kernels for shapes and GPUs into the cache; needs no GPU",
    "tune": "search for faster configs on this GPU and store them in your table",
}


def parser_of(chosen: str | None, script: bool = False) -> Parser:
    """The parser, with the arguments of the chosen command. script: of emulate with a script.

    A command refuses in `begin` what it can without torch, which takes seconds to import, and `run` does the rest.
    """
    parser = Parser(prog=program_name(), description=_ABOUT)
    parser.add_argument("--version", action="version", version=f"quackish {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, summary in COMMANDS.items():
        module = (
            importlib.import_module(f"quackish.cli.{name}{'_script' if script else ''}") if name == chosen else None
        )
        command = subparsers.add_parser(name, help=summary, description=None if module is None else module.__doc__)
        if module is not None:
            module.add_arguments(command)
            command.set_defaults(begin=getattr(module, "begin", lambda args: None), run=module.run)
    return parser
