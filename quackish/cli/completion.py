"""Prints a script with which bash or zsh completes commands, options, operations, models and GPUs.

    quackish completion bash > ~/.local/share/bash-completion/completions/quackish
    quackish completion zsh > ~/.zsh/_quackish

bash needs the package bash-completion. For zsh the folder must be in fpath before compinit: `fpath+=~/.zsh; autoload -U
compinit; compinit` in ~/.zshrc. New shells then complete `quackish`. Completing starts no Python, so print the script
again after an update.

This command needs shtab (`pip install 'quackish[completion]'`).
"""

import argparse
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from quackish.argument_types import Words
from quackish.cli.commands import COMMANDS, parser_of
from quackish.cli.parser import CommandError, output_folder

SHELLS = ("bash", "zsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    if importlib.util.find_spec("shtab") is None:
        raise CommandError("shtab is not installed; `pip install shtab` installs it")
    import shtab

    parser = parser_of(list(COMMANDS))
    parser.prog = "quackish"  # also if this is `quackish`
    for action in _actions(parser):
        if isinstance(action.type, Words):
            action.choices = action.type.words
        elif action.choices and not isinstance(action, argparse._SubParsersAction):
            action.choices = tuple(action.choices)  # shtab takes a dict for commands
        elif action.type in (Path, output_folder):
            action.complete = shtab.FILE if action.type is Path else shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those of all commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for subparser in dict.fromkeys(action.choices.values()):
                yield from _actions(subparser)
