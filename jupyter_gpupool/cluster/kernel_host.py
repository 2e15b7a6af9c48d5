# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A program that runs as a kernel's user, on the kernel's machine, and executes one order.

An order tells the program to become the kernel, to remove the kernel's files, to return the last
part of the kernel's log, or to send this machine's broker a request about the kernel. The broker
runs as root. It starts this program, so that it never opens a file of a user itself. The program
reads the order from standard input as one line of JSON, and writes the answer to standard output in
the same form.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from string import Template
from typing import Any, Mapping, NoReturn

from ..client import Client
from ..endpoint import user_runtime_dir
from ..errors import Code, GPUPoolError, RefusedError
from ..launcher import (
    OPENED_VARIABLE,
    encrypts,
    has_launcher,
    kernel_command,
    open_session,
    read_kernelspec,
)
from ..local_machine import make_private
from ..protocol import encode, error_message

PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")

#: ``LAST``: maximum bytes of a log in an answer. ``MOST``: if a log has more bytes than this, the
#: next start of the kernel empties the log.
LAST, MOST = 16 << 10, 4 << 20

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def missing(machine: str, what: str, next_step: str) -> RefusedError:
    """Return a refusal that names ``machine`` and what it lacks."""
    return RefusedError(f"On {machine}, {what}.", code=Code.NOT_THERE, next_step=next_step)


class KernelFiles:
    """The files of one kernel in its user's private folder."""

    def __init__(self, kernel_id: str) -> None:
        if not _NAME.fullmatch(kernel_id):
            raise RefusedError("The kernel id in this order is not valid.", code=Code.BAD_REQUEST)
        self._folder = user_runtime_dir() / "kernels"
        self.connection_file = self._folder / f"kernel-{kernel_id}.json"
        self.log = self._folder / f"kernel-{kernel_id}.log"

    def make(self) -> None:
        """Make the folder, which only this user may enter."""
        for path in (self._folder.parent, self._folder):
            make_private(path)

    def write(self, connection: Mapping[str, Any]) -> None:
        """Write the connection file, which has the kernel's keys."""
        self.connection_file.unlink(missing_ok=True)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        with os.fdopen(os.open(self.connection_file, flags, 0o600), "w") as file:
            json.dump(connection, file)

    def open_log(self) -> int:
        """Return a descriptor of the kernel's log."""
        with suppress(OSError):
            if self.log.stat().st_size > MOST:
                self.log.unlink()
        return os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def tail(self) -> str:
        """Return the end of the kernel's log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - LAST))
                return file.read(LAST).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def remove(self) -> None:
        """Remove the files of a kernel that has ended."""
        for path in (self.connection_file, self.log):
            path.unlink(missing_ok=True)


def kernelspec(order: Mapping[str, Any], machine: str) -> dict[str, Any]:
    """Return the order's kernelspec.

    Refuse the order if this machine lacks the kernelspec, or if the kernelspec does not say that
    the kernel can encrypt messages.
    """
    name = str(order["kernel"])
    spec = dict(read_kernelspec(name)) if _NAME.fullmatch(name) else {}
    if not spec.get("argv"):
        raise missing(machine, f"there is no kernelspec {name[:80]!r}", "Install it there, too.")
    if not encrypts(spec):
        raise RefusedError(
            f"The kernelspec {name!r} on {machine} does not say that its kernel can encrypt "
            "messages. A kernel that is used from another machine must encrypt them.",
            code=Code.NO_CURVE,
            next_step='If the kernel can do so, add "supported_encryption": ["curve"] to the '
            "metadata of the kernelspec.",
        )
    return spec


def command_of(spec: Mapping[str, Any], place: KernelFiles, machine: str) -> list[str]:
    """Return the kernel's command; refuse the order if this machine lacks the program."""
    fields = {"{connection_file}": str(place.connection_file)}
    command = [_filled(str(word), fields) for word in spec["argv"]]
    if has_launcher(command):
        command = kernel_command(command)
    if re.fullmatch(r"python(3(\.\d+)?)?", command[0]):
        command[0] = sys.executable  # jupyter_client does the same
    if command[0] != sys.executable and shutil.which(command[0]) is None:
        raise missing(
            machine, f"there is no program {command[0][:200]}",
            "The environment of the kernel must exist there, at the same path.",
        )  # fmt: skip
    return command


def _filled(word: str, fields: Mapping[str, str]) -> str:
    for name, value in fields.items():
        word = word.replace(name, value)
    return word


def enter(folder: str, machine: str) -> None:
    """Enter the kernel's working folder."""
    if not Path(folder).is_absolute():
        raise missing(
            machine, "the path of the working folder is not absolute", "Open the notebook again."
        )
    try:
        os.chdir(folder)
    except OSError as error:
        raise missing(
            machine, f"the folder {folder[:200]} cannot be entered ({error.strerror})",
            "The notebook's folder must be on a file system that both machines share, and the "
            f"service of the broker on {machine} must not hide this folder (ProtectHome).",
        ) from None  # fmt: skip


def hold_ports(address: str, before: Mapping[str, int]) -> dict[str, int]:
    """Return a port for each channel, and reserve it: the port in ``before``, or else a free port.

    The kernel binds the ports about a second later. Until then Linux must give none of these ports
    to another program. So this function binds a socket to each port, and the kernel inherits these
    sockets.
    The kernel can still bind the ports, because ZeroMQ and this function set ``SO_REUSEADDR``.
    """
    holders = {}
    with ExitStack() as opened:
        for name in PORTS:
            holder = holders[name] = opened.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind((address, int(before.get(name, 0))))
            except OSError as error:
                raise RefusedError(
                    f"A port at {address} cannot be used: {error.strerror}.",
                    code=Code.AGAIN,
                    next_step="Shut the kernel down and start it again.",
                ) from None
        found = {name: holder.getsockname()[1] for name, holder in holders.items()}
        for holder in holders.values():
            os.set_inheritable(holder.detach(), True)
    return found


def start(message: Mapping[str, Any]) -> tuple[list[str], dict[str, str], dict[str, Any], int]:
    """Prepare a kernel; return its command, its environment, the answer, and its open log."""
    order, machine = message["order"], message["machine"]
    place = KernelFiles(str(order["kernel_id"]))
    place.make()
    spec = kernelspec(order, machine)
    command = command_of(spec, place, machine)
    enter(str(order["cwd"]), machine)
    secrets, address = order["secrets"], message["address"]
    ports = hold_ports(address, order.get("ports") or {})
    place.write({
        "ip": address, "transport": "tcp", "kernel_name": order["kernel"], **ports,
        **{name: str(secrets[name]) for name in _SECRETS},
    })  # fmt: skip
    env = dict(os.environ)
    env.update({
        name: Template(str(value)).safe_substitute(env)
        for name, value in (spec.get("env") or {}).items()
    })  # fmt: skip
    env["JPY_SESSION_NAME"] = str(order.get("label") or "")
    metadata = dict(spec.get("metadata") or {})
    provisioner = dict(metadata.get("kernel_provisioner") or {})
    stanza = dict(provisioner.get("config") or {})
    # The user's options for this start take precedence over the options of the kernelspec.
    stanza.update(order.get("options") or {})
    model, data = str(stanza.pop("model", "")), [*map(str, stanza.pop("data", ()))]
    stanza["broker_socket"] = message["socket"]
    spec["metadata"] = {
        **metadata,
        "kernel_provisioner": {**provisioner, "config": stanza},
    }
    command, why_not = open_session(
        command, spec, str(order["kernel"]), env,
        client_here=False, model=model, data=[*data, str(order["cwd"])],
    )  # fmt: skip
    if has_launcher(command):
        env[OPENED_VARIABLE] = "1"
    return command, env, {"ip": address, **ports, "note": why_not}, place.open_log()


_SECRETS = ("key", "signature_scheme", "curve_publickey", "curve_secretkey")


def perform(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Execute an order that does not start a kernel; return the answer."""
    order = message["order"]
    if order["do"] == "tell":
        # The broker sees this process's user id, and checks that the session belongs to this user.
        with Client(Path(message["socket"])) as client:
            answer = client.call(order["request"], session=order["session"], **order["fields"])
        return {"answer": {k: v for k, v in answer.items() if k not in ("v", "type", "id")}}
    place = KernelFiles(str(order["kernel_id"]))
    if order["do"] == "clean":
        place.remove()
        return {}
    return {"log": place.tail()}


def _become(command: list[str], env: dict[str, str], log: int) -> NoReturn:
    # This process ignores and blocks the same signals as the broker, which started it. Reset these
    # signals: nobody could interrupt a kernel that ignores SIGINT.
    for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    give_up_protection()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.execvpe(command[0], command, env)


def give_up_protection(path: Path = Path("/proc/self/oom_score_adj")) -> None:
    """Make Linux kill this process before the broker if memory runs out.

    The broker's service protects the broker from the OOM killer. This process has inherited the
    protection, so it gives the protection up.
    """
    with suppress(OSError, ValueError):
        if int(path.read_text()) < 0:
            path.write_text("0")


def main() -> int:
    """Read an order and execute it."""
    message = json.loads(sys.stdin.readline())
    becomes, fault = None, "The order could not be carried out"
    try:
        if message["order"]["do"] == "start":
            fault = "The kernel could not be prepared"
            command, env, answer, log = start(message)
            becomes = command, env, log
        else:
            answer = dict(perform(message))
        line = encode({"type": "ok", **answer})
    except GPUPoolError as error:
        line = encode(error_message(error, None))
    except (
        KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, OSError
    ) as error:  # fmt: skip
        text = f"{fault}: {type(error).__name__}: {error}."
        line = encode(error_message(GPUPoolError(text, code=Code.BAD_REQUEST), None))
    sys.stdout.buffer.write(line)
    sys.stdout.flush()
    if becomes is not None:
        _become(*becomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
