# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Kernels that this machine runs for servers on other machines, as the users who ask for them.

An order comes in a credential that names its user and this machine. The broker itself opens no file
of a user: a program does that as the user, and becomes the kernel, see ``cluster/kernel_host.py``.
The kernel opens its session by itself, as one that a client starts here would.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..cluster.identity import Authenticator, CheckedCredential, cannot, read_order
from ..errors import Code, GPUPoolError, RefusedError
from ..procfs import ProcessId, alive
from ..protocol import Message, decode, error_message
from .configuration import Configuration
from .core import Core

#: Seconds in which the program that becomes a kernel must have done so.
PATIENCE = 50.0

#: Most bytes of that program's answer: it is the user's process.
MOST_BYTES = 1 << 17
#: Ended kernels whose exit codes are known.
KEPT = 1000

_MODULE = "jupyter_gpupool.cluster.kernel_host"
_KILL = "import os, sys; os.killpg(int(sys.argv[1]), int(sys.argv[2]))"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: What an order may ask for.
_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1, signal.SIGUSR2,
                      signal.SIGHUP, signal.SIGQUIT, signal.SIGCONT, signal.SIGSTOP})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Account:
    """A user of this machine, and the variables of a kernel that starts anew."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    environment: Mapping[str, str]


def switch_to(account: Account) -> tuple[list[str], dict[str, Any]]:
    """Return words before a command, and arguments of ``Popen``, that run it as a user."""
    if os.geteuid() != 0:
        return [], {}
    return [], {"user": account.uid, "group": account.gid, "extra_groups": account.groups}


class Hosting:
    """Carries out orders from other machines.

    Parameters
    ----------
    node:
        The name of this machine.
    authenticator:
        Checks credentials; None if this machine takes no orders.
    """

    def __init__(
        self,
        core: Core,
        configuration: Configuration,
        node: str,
        authenticator: Authenticator | None,
    ) -> None:
        self._core = core
        self._configuration = configuration
        self._node = node
        self._authenticator = authenticator
        #: By user and kernel: the processes that this broker has started.
        self._started: dict[tuple[int, str], subprocess.Popen[bytes]] = {}
        self._starting: set[tuple[int, str]] = set()

    async def perform(self, credential: str) -> Message:
        """Carry out the order in a credential; return ``ok`` or ``error`` as a message."""
        try:
            return {"type": "ok", **await self._perform(credential)}
        except GPUPoolError as error:
            return error_message(error, None)
        except (KeyError, TypeError, ValueError, OSError, subprocess.SubprocessError) as error:
            text = f"{self._node} did not carry out an order: {type(error).__name__}: {error}."
            return error_message(GPUPoolError(text, code=Code.INTERNAL), None)

    async def _perform(self, credential: str) -> Mapping[str, Any]:
        if self._authenticator is None:
            raise cannot(
                f"{self._node} runs no kernels of other machines.",
                "Its admin may set c.GPUPool.cluster_identity.",
            )
        found = await asyncio.to_thread(self._authenticator.check, credential)
        order = read_order(found, self._node)
        kernel, do = str(order.get("kernel_id"))[:100], order.get("do")
        key = found.uid, kernel
        if do == "start":
            return await self._start(key, order, found)
        if do == "signal":
            return await self._signal(key, order.get("signal"))
        if do == "poll":
            return self._poll(key)
        if do in ("log", "clean"):
            if do == "clean" and self._poll(key)["running"]:
                raise RefusedError("This kernel still runs.", code=Code.BAD_REQUEST)
            return (await asyncio.to_thread(self._run_as, found.uid, order))[0]
        raise RefusedError(f"There is no order {str(do)[:40]!r}.", code=Code.UNKNOWN_TYPE)

    # ------------------------------------------------------------------ kernels

    async def _start(
        self, key: tuple[int, str], order: Message, found: CheckedCredential
    ) -> Mapping[str, Any]:
        if key in self._starting or self._poll(key)["running"]:
            raise RefusedError("This kernel runs already.", code=Code.DUPLICATE)
        self._starting.add(key)
        try:
            answer, process = await asyncio.to_thread(self._run_as, found.uid, order)
        finally:
            self._starting.discard(key)
        self._reap()
        self._started[key] = process
        return {**answer, "pid": process.pid}

    def _reap(self) -> None:
        """Wait for the kernels that have ended; remember the exit codes of the last ones."""
        ended = [key for key, process in self._started.items() if process.poll() is not None]
        for key in ended[:-KEPT]:
            del self._started[key]

    def _poll(self, key: tuple[int, str]) -> dict[str, Any]:
        """Return whether a kernel runs; if it has ended, its exit code where that is known."""
        process = self._started.get(key)
        if process is not None:
            code = process.poll()
            return {"running": code is None, "code": code}
        return {"running": self._recovered(key) is not None, "code": None}

    def _recovered(self, key: tuple[int, str]) -> ProcessId | None:
        """Return the process of a kernel that a broker before this one has started."""
        for session in self._core.sessions:
            process = session.process
            if (session.uid, session.kernel_id) == key and process is not None and alive(process):
                return process
        return None

    async def _signal(self, key: tuple[int, str], number: Any) -> dict[str, Any]:
        """Send a kernel and its children a signal, with the rights of its user."""
        if number not in _SIGNALS:
            raise RefusedError("An order cannot ask for this signal.", code=Code.BAD_REQUEST)
        process = self._started.get(key)
        pid = None
        if process is not None:
            pid = process.pid if process.poll() is None else None
        elif (recovered := self._recovered(key)) is not None:
            pid = recovered.pid
        if pid is not None:
            await asyncio.to_thread(self._kill_as, key[0], pid, int(number))
        return {"running": pid is not None}

    # ------------------------------------------------------------------ in a thread

    def _kill_as(self, uid: int, pid: int, number: int) -> None:
        """Send a signal with the rights of a user: a kernel's children may be others' processes."""
        account = self._account(uid)
        prefix, switch = switch_to(account)
        subprocess.run(
            [*prefix, sys.executable, "-I", "-S", "-c", _KILL, str(pid), str(number)],
            env=dict(account.environment), cwd="/", stdin=subprocess.DEVNULL, check=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=PATIENCE, **switch,
        )  # fmt: skip

    def _run_as(
        self, uid: int, order: Message
    ) -> tuple[Mapping[str, Any], subprocess.Popen[bytes]]:
        """Have the program carry out an order as its user; return its answer, and its process."""
        account = self._account(uid)
        prefix, switch = switch_to(account)
        message = {
            "order": order,
            "machine": self._node,
            "socket": str(self._configuration.socket),
            "address": self._address() if order["do"] == "start" else "",
        }
        try:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", _MODULE],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                env=dict(account.environment), cwd="/", start_new_session=True, umask=0o022,
                **switch,
            )  # fmt: skip
        except OSError as error:
            raise RefusedError(
                f"On {self._node}, user id {uid} cannot run {sys.executable} ({error.strerror}).",
                code=Code.NOT_THERE,
                next_step="Install the broker where all users may read it, such as /opt/gpupool. "
                "Its service must leave it CAP_SETUID and CAP_SETGID.",
            ) from None
        # It may wait for a file system that hangs.
        timer = threading.Timer(PATIENCE, process.kill)
        timer.start()
        try:
            with process.stdin as given, process.stdout as said:  # type: ignore[union-attr]
                with suppress(BrokenPipeError):
                    given.write(json.dumps(message).encode() + b"\n")
                    given.flush()
                line = said.readline(MOST_BYTES)
        finally:
            timer.cancel()
        try:
            answer = decode(line)
        except GPUPoolError:
            process.kill()
            code = process.wait()
            raise RefusedError(
                f"The program that becomes the kernel did not answer on {self._node} ({code}).",
                code=Code.START_FAILED,
                next_step="The log of the broker there may say why.",
            ) from None
        if answer["type"] == "error" or order["do"] != "start":
            process.wait()
        if answer["type"] == "error":
            raise RefusedError(
                str(answer["message"]), code=Code.of(answer["code"], Code.REFUSED),
                next_step=str(answer["next_step"]), details=answer["details"],
            )  # fmt: skip
        return {k: v for k, v in answer.items() if k not in ("type", "v", "id")}, process

    def _account(self, uid: int) -> Account:
        """Return the account of a user, for whom a kernel may be started here."""
        own = os.geteuid()
        if uid == 0 or own not in (0, uid):
            # A kernel of root could do everything here. A user's own broker cannot become another.
            raise RefusedError(
                f"The broker of {self._node} starts no kernel for user id {uid}.",
                code=Code.NOT_ALLOWED,
                next_step="A broker that runs as root starts kernels for all users but root.",
            )
        try:
            found = pwd.getpwuid(uid)
        except KeyError:
            raise RefusedError(
                f"User id {uid} has no account on {self._node}.",
                code=Code.NOT_THERE,
                next_step="All machines of the cluster must have the same user ids.",
            ) from None
        groups = tuple(os.getgrouplist(found.pw_name, found.pw_gid))
        return Account(uid, found.pw_gid, groups, {
            "HOME": found.pw_dir, "USER": found.pw_name, "LOGNAME": found.pw_name,
            "SHELL": found.pw_shell or "/bin/sh", "PATH": _PATH, "LANG": "C.UTF-8",
        })  # fmt: skip

    def _address(self) -> str:
        """Return the address of this machine that the others know."""
        configured = self._configuration.settings.cluster_address
        if configured:
            return configured
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                # Sends nothing: only asks which address a packet to elsewhere would have.
                probe.connect(("192.0.2.1", 9))
                return str(probe.getsockname()[0])
            except OSError:
                raise RefusedError(
                    f"The broker of {self._node} does not know its address.",
                    code=Code.NOT_THERE,
                    next_step="Set c.GPUPool.cluster_address there.",
                ) from None
