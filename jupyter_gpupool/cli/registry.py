# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Registers functions as the commands of ``jupyter gpupool``."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Callable

Options = argparse.Namespace

#: The headings in the help, in their order. Each command is listed under one of them.
GROUPS = (
    "See the pool",
    "Act on it",
    "Programs in the pool",
    "Kernels that use it",
    "Take GPUs out and back",
    "Set it up and check it",
    "Several machines",
    "Try it",
)

#: The exit codes of a command that lists no exit codes of its own.
EXIT_CODES = "Exit codes: 0 done, 1 a problem or a refusal (nothing was changed), 2 wrong usage."

#: A function that adds arguments to the parser of a command.
Argument = Callable[[argparse._ActionsContainer], object]


@dataclass(frozen=True)
class Subcommand:
    """One command: its description, its arguments, and the function that returns its exit code."""

    name: str
    group: str
    does: str
    arguments: tuple[Argument, ...]
    run: Callable[[Options], int]
    exit_codes: str = EXIT_CODES


#: All commands by name.
COMMANDS: dict[str, Subcommand] = {}


def command(
    group: str, does: str, *arguments: Argument, exit_codes: str = EXIT_CODES
) -> Callable[..., Any]:
    """Return a decorator that registers a function as a command.

    The function ``_status`` becomes the command ``status``.
    """

    def register(run: Callable[[Options], int]) -> Callable[[Options], int]:
        known = run.__name__[1:].replace("_", "-")
        COMMANDS[known] = Subcommand(known, group, does, arguments, run, exit_codes)
        return run

    return register


def in_order() -> list[Subcommand]:
    """Return the commands in the order of the help."""
    return sorted(COMMANDS.values(), key=lambda one: GROUPS.index(one.group))


def argument(*names: str, **settings: Any) -> Argument:
    """Return an argument of a command; the parameters are those of ``add_argument``."""
    return lambda parser: parser.add_argument(*names, **settings)


def either(*arguments: Argument) -> Argument:
    """Return arguments that exclude each other."""

    def add(parser: argparse._ActionsContainer) -> None:
        group = parser.add_mutually_exclusive_group()
        for one in arguments:
            one(group)

    return add


def seconds_between(text: str) -> float:
    """Return the option ``text`` as a number: the seconds between two pictures."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return value


SOCKET = argument(
    "--socket", default="", metavar="PATH",
    help="the broker's socket (default: as configured, else found automatically)",
)  # fmt: skip
DEVICE = argument(
    "--device", default="", metavar="GPU",
    help="number, UUID, or the beginning of a UUID; default: the whole pool",
)  # fmt: skip
ONE_DEVICE = argument(
    "--device", default="", metavar="GPU", required=True,
    help="number, UUID, or the beginning of a UUID",
)  # fmt: skip
REASON = argument("--reason", default="", metavar="TEXT", help="shown to waiting users")
JSON = argument("--json", action="store_true", help="print JSON")
