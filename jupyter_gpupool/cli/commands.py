# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The commands of ``jupyter gpupool``: each is a function. Only this module prints errors.

A command is a function with the decorator :func:`registry.command`. The description and the
arguments of the command are arguments of the decorator. Longer code is in modules that are imported
only when their command runs, so that ``status``, for example, does not wait for the import of
jupyter_client.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import NoReturn, Sequence

from .. import __version__
from ..errors import Code, GPUPoolError, RefusedError
from ..text import did_you_mean
from . import cluster_commands, program_commands  # noqa: F401 (registers them)
from .registry import (
    COMMANDS,
    DEVICE,
    EXIT_CODES,
    JSON,
    ONE_DEVICE,
    REASON,
    SOCKET,
    Options,
    argument,
    command,
    either,
    in_order,
    seconds_between,
)
from .top_table import SORTS

PROG = "jupyter gpupool"

_SUMMARY = "GPU slices for Jupyter kernels: attached while needed, given back with nothing lost."

# ---------------------------------------------------------------------- the commands


@command(
    "See the pool", "draw the pool: GPUs, kernels, the queue",
    SOCKET,
    argument("--watch", "-w", action="store_true", help="draw again until Ctrl-C"),
    argument("--json", action="store_true", help="print JSON, all sizes in bytes"),
    argument("--cluster", action="store_true", help="show the machines of this machine's cluster"),
    argument(
        "--interval", type=seconds_between, default=1.0, metavar="SECONDS",
        help="seconds between two updates of --watch (default: 1)",
    ),
)  # fmt: skip
def _status(options: Options) -> int:
    from .status import show_status

    if options.cluster:
        if options.watch:
            raise RefusedError(
                "status --cluster does not take --watch.", code=Code.BAD_REQUEST,
                next_step="Leave out --watch, or use: watch jupyter gpupool status --cluster",
            )  # fmt: skip
        from .cluster_status import show_cluster

        return show_cluster(options.socket, as_json=options.json)
    return show_status(
        options.socket, as_json=options.json, watch=options.watch, interval=options.interval
    )


@command(
    "See the pool", "show the sessions and what each does not use; admins can act on sessions",
    SOCKET,
    argument(
        "--sort", choices=SORTS, default=SORTS[0], metavar="COLUMN",
        help=f"one of {', '.join(SORTS)} (default: {SORTS[0]})",
    ),
    argument(
        "--interval", type=seconds_between, default=2.0, metavar="SECONDS",
        help="seconds between two updates (default: 2)",
    ),
)  # fmt: skip
def _top(options: Options) -> int:
    from .top import show_top

    return show_top(options.socket, sort=options.sort, interval=options.interval)


SESSION = argument(
    "session", metavar="SESSION",
    help="session or kernel id, or the beginning of one; or its name",
)  # fmt: skip


@command(
    "See the pool", "say why a kernel waits, or who may take its slice and when",
    SOCKET, JSON,
    SESSION,
)  # fmt: skip
def _why(options: Options) -> int:
    from .status import why

    return why(options.socket, options.session, as_json=options.json)


@command(
    "Act on it", "give a kernel's slice back, now or when its cell ends",
    SOCKET,
    SESSION,
)  # fmt: skip
def _release(options: Options) -> int:
    from .status import release

    return release(options.socket, options.session)


@command("Kernels that use it", "list the kernels that use the pool")
def _list(_: Options) -> int:
    from ..kernelspecs import list_pooled

    rows = [("KERNEL", "SHOWN AS", "WRAPS", "FOLDER")]
    rows += [(k.name, k.display_name, k.wraps or "-", str(k.path)) for k in list_pooled()]
    if len(rows) == 1:
        print("No kernel uses the pool. Make one with: jupyter gpupool wrap python3")
        return 0
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    return 0


@command(
    "Kernels that use it", "make a pooled twin of an installed kernel, of any language",
    argument("name", metavar="NAME", help="as `jupyter kernelspec list` shows it"),
    either(
        argument("--user", action="store_true", help="for your user, in the home folder"),
        argument("--sys-prefix", action="store_true", help="in this Python environment"),
        argument("--prefix", metavar="FOLDER", help="under FOLDER/share/jupyter/kernels"),
    ),
    argument(
        "--remote", action="store_true",
        help="its kernels start on the machine that the cluster chooses; run the same command on "
        "every machine",
    ),
    argument(
        "--name", dest="new_name", metavar="NEW",
        help="default: gpupool-NAME, with --remote gpupool-remote-NAME",
    ),
    argument("--display-name", metavar="TEXT", help="default: with ' (Pooled GPU)' added"),
)  # fmt: skip
def _wrap(options: Options) -> int:
    from .. import kernelspecs
    from ..launcher import kernel_command, runs_ipykernel

    folder = kernelspecs.wrap(
        options.name,
        user=options.user,
        prefix=sys.prefix if options.sys_prefix else options.prefix,
        remote=options.remote,
        new_name=options.new_name,
        display_name=options.display_name,
    )
    print(f"Kernel {folder.name!r} uses the pool: {folder}")
    if options.remote:
        print("Every machine of the cluster needs this kernel under this name, too.")
    argv = json.loads((folder / "kernel.json").read_text())["argv"]
    if not runs_ipykernel(kernel_command(argv)):
        print(
            "Note: this is not an IPython kernel, so it has no %gpu. The guard asks for a slice at "
            "the kernel's first CUDA call.\n`jupyter gpupool doctor` says whether this pool has "
            "the guard. In a pool without the guard, this kernel runs without a GPU."
        )
    return 0


@command(
    "Kernels that use it", "remove a pooled twin; the kernel it was made from stays",
    argument("name", metavar="NAME", help="as `jupyter gpupool list` shows it"),
)  # fmt: skip
def _unwrap(options: Options) -> int:
    from ..kernelspecs import unwrap

    unwrap(options.name)
    print(f"Removed {options.name!r}. Open kernels keep running.")
    return 0


@command(
    "Take GPUs out and back", "suspend every kernel and close the driver's device files",
    SOCKET, DEVICE, REASON,
)  # fmt: skip
def _pause(options: Options) -> int:
    from .maintenance import pause

    return pause(options.socket, options.device, options.reason)


@command(
    "Take GPUs out and back", "empty one GPU; its kernels go on elsewhere",
    SOCKET, ONE_DEVICE, REASON,
)  # fmt: skip
def _drain(options: Options) -> int:
    from .maintenance import drain

    return drain(options.socket, options.device, options.reason)


@command(
    "Take GPUs out and back", "test GPUs and return them to service after pause or drain",
    SOCKET, DEVICE,
)  # fmt: skip
def _resume(options: Options) -> int:
    from .maintenance import resume

    return resume(options.socket, options.device)


@command(
    "Set it up and check it", "check everything and say what to do",
    SOCKET, JSON,
    argument(
        "--retest", action="store_true", help="first let the broker test failed GPUs again"
    ),
    argument(
        "--config", action="append", default=[], type=Path, metavar="FILE",
        help="also read this configuration file",
    ),
    argument(
        "--inside", action="store_true",
        help="check this container instead: whether its kernels can use the machine's pool",
    ),
)  # fmt: skip
def _doctor(options: Options) -> int:
    from .doctor import examine

    return examine(
        options.socket,
        config_files=options.config,
        as_json=options.json,
        retest=options.retest,
        inside=options.inside,
    )


@command(
    "Set it up and check it", "print what the configuration means, or all its mistakes",
    SOCKET, JSON,
    argument(
        "file", metavar="FILE", nargs="?", type=Path,
        help="also read this file, after those that Jupyter reads",
    ),
    argument("--alone", action="store_true", help="read only FILE, not Jupyter's own files"),
    argument(
        "--devices", default="", metavar="GPUS",
        help="calculate sizes for these GPUs, such as 16x80GiB (default: those of this machine)",
    ),
    argument(
        "--at", default="", metavar="TIME",
        help="show the groups as they are at this time, such as '2026-11-23 22:00' (default: now)",
    ),
)  # fmt: skip
def _check_config(options: Options) -> int:
    from .check_config import check

    return check(
        options.file, alone=options.alone, devices=options.devices, at=options.at,
        socket=options.socket, as_json=options.json,
    )  # fmt: skip


@command(
    "Set it up and check it", "make the environment of the broker's device processes",
    either(
        argument(
            "--folder", type=Path, metavar="FOLDER",
            help="make the environment there (default: in this Python environment, or else in your "
            "home folder)",
        ),
        argument(
            "--download", type=Path, metavar="FOLDER",
            help="only fetch the wheels into FOLDER, for a machine without network",
        ),
    ),
    argument(
        "--wheels", type=Path, metavar="FOLDER",
        help="take the packages from FOLDER, not from an index",
    ),
)  # fmt: skip
def _install_devices(options: Options) -> int:
    from .install_devices import download_devices, install_devices

    if options.download:
        return download_devices(options.download)
    return install_devices(folder=options.folder, wheels=options.wheels)


@command(
    "Set it up and check it", "install or upgrade the machine's broker as a service; root only",
    argument(
        "--manager", choices=("systemd", "openrc", "runit"), default="",
        help="the service manager (default: the one that runs here)",
    ),
    argument(
        "--config", action="append", default=[], type=Path, metavar="FILE",
        help="the broker also reads this configuration file",
    ),
    argument(
        "--root", type=Path, metavar="FOLDER",
        help="only write the files, below FOLDER: for the image of a machine",
    ),
    argument(
        "--foreground", action="store_true",
        help="install nothing; run the machine's broker here until a signal ends it",
    ),
    argument("--undo", action="store_true", help="stop the service and remove its files"),
    argument("--dry-run", action="store_true", help="show files and commands, change nothing"),
)  # fmt: skip
def _install_service(options: Options) -> int:
    if options.foreground:
        from ..broker.app import main
        from ..endpoint import MACHINE_SOCKET

        files = [word for path in options.config for word in ("--config", str(path))]
        return main(["--socket", str(MACHINE_SOCKET), *files])
    from .install_service import install_service

    return install_service(
        manager=options.manager, root=options.root, config=options.config, undo=options.undo,
        dry_run=options.dry_run,
    )  # fmt: skip


@command("Set it up and check it", "print a commented configuration file")
def _generate_config(_: Options) -> int:
    from .configtext import commented_config

    print(commented_config())
    return 0


@command(
    "Set it up and check it", "run the broker here, in the foreground",
    argument("arguments", nargs=argparse.REMAINDER, help="see `broker --help`"),
)  # fmt: skip
def _broker(options: Options) -> int:
    from ..broker.app import main

    return main(list(options.arguments))


@command(
    "Try it", "show three notebooks that share too few GPUs and lose nothing",
    argument(
        "--emulate", default="", metavar="MACHINE",
        help="the GPUs to emulate, such as 2x16GiB",
    ),
    argument("--svg", default="", metavar="FILE", help="also write the timeline there"),
    argument("--lab", action="store_true", help="open JupyterLab instead"),
)  # fmt: skip
def _demo(options: Options) -> int:
    from ..demo import run_demo, run_lab

    if options.lab:
        return run_lab(emulate=options.emulate) or 0
    return run_demo(emulate=options.emulate, svg=options.svg)


# ---------------------------------------------------------------------- parsing and running


class _Parser(argparse.ArgumentParser):
    """A parser whose error messages fit on one line and name the most similar valid word."""

    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"argument (.+?): invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if wrong:
            name, given, listed = wrong.groups()
            choices = re.findall(r"[^\s,']+", listed)
            if set(choices) >= set(COMMANDS):
                message = f"there is no command {given!r}. {did_you_mean(given, COMMANDS)}"
            else:
                hint = did_you_mean(given, choices)
                message = f"{name} takes {', '.join(choices)}, not {given!r}. {hint}"
            message = message.strip()
        if not message.endswith((".", "?")):
            message += "."
        self.exit(2, f"{self.prog}: {message} See `{self.prog} --help`.\n")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """A help formatter that puts even the longest command name and its help on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)


def _description() -> str:
    """Return the text that says what the program does and lists its commands by task."""
    lines = [_SUMMARY, ""]
    for group, members in groupby(in_order(), lambda one: one.group):
        lines.append(f"{group:<25}{', '.join(one.name for one in members)}")
    return "\n".join(lines) + "\n"


def _build() -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    """Return the program's parser, and the parser of each command."""
    parser = _Parser(
        prog=PROG, description=_description(), epilog=EXIT_CODES, formatter_class=_Formatter
    )
    parser.add_argument("--version", action="version", version=__version__)
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    parsers: dict[str, argparse.ArgumentParser] = {}
    for one in in_order():
        sentence = f"{one.does[0].upper()}{one.does[1:]}."
        parsers[one.name] = choices.add_parser(
            one.name, help=one.does, description=sentence, epilog=one.exit_codes,
            formatter_class=_Formatter,
        )  # fmt: skip
        for add in one.arguments:
            add(parsers[one.name])
    return parser, parsers


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command; the documentation is generated from these parsers."""
    return _build()[1]


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An error prints one sentence on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        # The broker parses its own arguments. argparse would take some of them, such as --help, for
        # options of this program.
        if arguments[:1] == ["broker"]:
            options = Options(command="broker", arguments=arguments[1:])
        else:
            options = _build()[0].parse_args(arguments)
        return COMMANDS[options.command].run(options)
    except GPUPoolError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130  # shells use this code for a process that SIGINT has ended
    except BrokenPipeError:
        # The reader of the output (``| head``) has closed the pipe. Send the rest of the output to
        # /dev/null: otherwise Python would print an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as error:  # argparse raises this after --help, --version and wrong usage
        return error.code if isinstance(error.code, int) else 2
