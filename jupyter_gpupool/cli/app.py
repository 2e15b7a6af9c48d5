# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The commands of ``jupyter gpupool``: options, exit codes, the one place that prints errors."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import NoReturn, Sequence

from .. import __version__
from ..errors import GPUPoolError
from ..text import did_you_mean

PROG = "jupyter gpupool"

_DESCRIPTION = """\
GPU slices for Jupyter kernels: attached while needed, given back with nothing lost.

See the pool             status
Act on it                release
Kernels that use it      list, wrap, unwrap
Take GPUs out and back   pause, drain, resume
Set it up and check it   doctor, install-devices, generate-config, broker
Try it                   demo
"""

_EXIT_CODES = "Exit codes: 0 done, 1 a problem or a refusal (nothing was changed), 2 wrong usage."


class _Parser(argparse.ArgumentParser):
    """argparse with errors that fit on a line and name the nearest right word."""

    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"argument .*: invalid choice: '([^']*)'", message)
        if wrong:
            hint = did_you_mean(wrong[1], COMMANDS)
            message = f"there is no command {wrong[1]!r}. {hint}".strip()
        if not message.endswith((".", "?")):
            message += "."
        self.exit(2, f"{self.prog}: {message} See `{self.prog} --help`.\n")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """The longest command name and its help on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket",
        default="",
        metavar="PATH",
        help="the broker's socket (default: as configured, else found by itself)",
    )


def _build() -> _Parser:
    parser = _Parser(
        prog=PROG,
        description=_DESCRIPTION,
        epilog=_EXIT_CODES,
        formatter_class=_Formatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    status = _add(commands, "status", "draw the pool: GPUs, kernels, the queue")
    _common(status)
    status.add_argument("--watch", "-w", action="store_true", help="draw again until Ctrl-C")
    status.add_argument("--json", action="store_true", help="print JSON, all sizes in bytes")
    status.add_argument(
        "--interval",
        type=_interval,
        default=1.0,
        metavar="SECONDS",
        help="between two pictures of --watch (default: 1)",
    )

    release = _add(commands, "release", "give a kernel's slice back, now or when its cell ends")
    _common(release)
    release.add_argument(
        "session", metavar="SESSION", help="session or kernel id, or the beginning of one"
    )

    pause = _add(commands, "pause", "suspend every kernel and close the driver's device files")
    drain = _add(commands, "drain", "empty one GPU; its kernels go on elsewhere")
    resume = _add(commands, "resume", "test GPUs and return them to service after pause or drain")
    for one in (pause, drain, resume):
        _common(one)
        one.add_argument(
            "--device", default="", metavar="GPU", required=one is drain,
            help="number, UUID, or the beginning of a UUID"
            + ("" if one is drain else "; default: the whole pool"),
        )  # fmt: skip
    for one in (pause, drain):
        one.add_argument("--reason", default="", metavar="TEXT", help="shown to waiting users")

    _add(commands, "list", "list the kernels that use the pool")

    wrap = _add(commands, "wrap", "make a pooled twin of an installed kernel, of any language")
    wrap.add_argument("name", metavar="NAME", help="as `jupyter kernelspec list` shows it")
    _where(wrap)
    wrap.add_argument("--name", dest="new_name", metavar="NEW", help="default: gpupool-NAME")
    wrap.add_argument("--display-name", metavar="TEXT", help="default: with ' (Pooled GPU)' added")

    unwrap = _add(commands, "unwrap", "remove a pooled twin; the kernel it was made from stays")
    unwrap.add_argument("name", metavar="NAME", help="as `jupyter gpupool list` shows it")

    doctor = _add(commands, "doctor", "check everything and say what to do")
    _common(doctor)
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument(
        "--retest", action="store_true", help="first have the broker test failed GPUs again"
    )
    doctor.add_argument(
        "--config", action="append", default=[], type=Path, metavar="FILE",
        help="also read this configuration file",
    )  # fmt: skip

    install = _add(
        commands, "install-devices", "make the environment of the broker's device processes"
    )
    where = install.add_mutually_exclusive_group()
    where.add_argument(
        "--folder", type=Path, metavar="FOLDER",
        help="make it there (default: in this Python environment, or else in your home folder)",
    )  # fmt: skip
    where.add_argument(
        "--download", type=Path, metavar="FOLDER",
        help="only fetch the wheels into FOLDER, for a machine without network",
    )  # fmt: skip
    install.add_argument(
        "--wheels", type=Path, metavar="FOLDER",
        help="take the packages from FOLDER, not from an index",
    )  # fmt: skip

    _add(commands, "generate-config", "print a commented configuration file")

    demo = _add(commands, "demo", "three notebooks, too few GPUs, nothing lost")
    demo.add_argument("--emulate", default="", metavar="MACHINE", help="such as 2x16GiB")
    demo.add_argument("--svg", default="", metavar="FILE", help="also write the timeline there")
    demo.add_argument("--lab", action="store_true", help="open JupyterLab instead")

    broker = _add(commands, "broker", "run the broker here, in the foreground")
    broker.add_argument("arguments", nargs=argparse.REMAINDER, help="see `broker --help`")
    return parser


def _add(
    commands: argparse._SubParsersAction[_Parser], name: str, does: str
) -> argparse.ArgumentParser:
    sentence = f"{does[0].upper()}{does[1:]}."
    return commands.add_parser(
        name, help=does, description=sentence, epilog=_EXIT_CODES, formatter_class=_Formatter
    )


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command; the documentation is written from them."""
    actions = _build()._actions
    found = next(a for a in actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


def _where(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--user", action="store_true", help="for your user, in the home folder")
    where.add_argument("--sys-prefix", action="store_true", help="in this Python environment")
    where.add_argument("--prefix", metavar="FOLDER", help="under FOLDER/share/jupyter/kernels")


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return value


COMMANDS = (
    "broker", "demo", "doctor", "drain", "generate-config", "install-devices", "list", "pause",
    "release", "resume", "status", "unwrap", "wrap",
)  # fmt: skip


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors are one sentence on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["broker"]:
            return _broker(arguments[1:])  # it has options of its own, --help among them
        return _dispatch(_build().parse_args(arguments))
    except GPUPoolError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130  # as shells say it: ended by SIGINT
    except BrokenPipeError:
        # The reader (``| head``) has enough; Python must not complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as error:  # argparse: --help, --version, wrong usage
        return error.code if isinstance(error.code, int) else 2


def _dispatch(options: argparse.Namespace) -> int:
    # Each command imports only what it needs: `status` must not wait for jupyter_client.
    command = options.command
    if command == "status":
        from .status import show_status

        return show_status(
            options.socket, as_json=options.json, watch=options.watch, interval=options.interval
        )
    if command == "release":
        from .status import release

        return release(options.socket, options.session)
    if command in ("pause", "drain", "resume"):
        from . import maintenance

        if command == "resume":
            return maintenance.resume(options.socket, options.device)
        method = maintenance.pause if command == "pause" else maintenance.drain
        return method(options.socket, options.device, options.reason)
    if command == "list":
        from .kernels import show_list

        return show_list()
    if command == "wrap":
        from .kernels import wrap

        prefix = sys.prefix if options.sys_prefix else options.prefix
        return wrap(
            options.name,
            user=options.user,
            prefix=prefix,
            new_name=options.new_name,
            display_name=options.display_name,
        )
    if command == "unwrap":
        from .kernels import unwrap

        return unwrap(options.name)
    if command == "doctor":
        from .doctor import examine

        return examine(
            options.socket,
            config_files=options.config,
            as_json=options.json,
            retest=options.retest,
        )
    if command == "install-devices":
        from .install import download_devices, install_devices

        if options.download:
            return download_devices(options.download)
        return install_devices(folder=options.folder, wheels=options.wheels)
    if command == "generate-config":
        from .configtext import commented_config

        print(commented_config())
        return 0
    from ..demo import run_demo, run_lab

    if options.lab:
        return run_lab(emulate=options.emulate) or 0
    return run_demo(emulate=options.emulate, svg=options.svg)


def _broker(arguments: Sequence[str]) -> int:
    from ..broker.app import main

    return main(list(arguments))
