# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs kernels on this machine for servers on other machines.

Each kernel runs as the user who asks for it. An order comes in a credential, which names the user
and this machine. The broker itself opens no file of a user. A program that runs as the user opens
the files, and then becomes the kernel, see ``cluster/kernel_host.py``. The kernel opens its own
session, like a kernel that a client starts on this machine.
"""

from __future__ import annotations

import os
import pwd
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..cluster.identity import Authenticator, CheckedCredential, cannot, read_order
from ..errors import Code, GPUPoolError, RefusedError
from ..procfs import ProcessId, alive, identify
from ..protocol import MOST_LOOKED, Message, decode, encode, error_message
from . import nss
from .configuration import Configuration
from .core import Core
from .sessions import Death
from .transport.auth import Peer

#: PATIENCE: the program that becomes a kernel must answer within this many seconds.
#: SIGNAL_PATIENCE: the program that sends a signal must end within this many seconds.
PATIENCE, SIGNAL_PATIENCE = 50.0, 10.0
#: Seconds to wait for the end of a killed program. A program that waits for a file system may end
#: much later.
END_PATIENCE = 2.0

#: How many threads may run at the same time. MOST_OF_USER: threads for the orders of one user.
#: MOST: threads for the orders of all users. MOST_CHECKS: threads that check credentials.
MOST_OF_USER, MOST, MOST_CHECKS = 8, 64, 64

#: The most bytes in the answer of the program that becomes a kernel. The program is the user's
#: process, so it may send anything.
MOST_BYTES = 1 << 17
#: The number of ended kernels whose exit codes the broker keeps.
KEPT = 1000

#: The requests that a user on another machine may send to this broker. Each request is about a
#: kernel on this machine.
_TOLD = frozenset({"release", "keep", "request", "why", "elsewhere"})

#: Python runs in isolated mode (-I). Otherwise environment variables, or Python files in the user's
#: home folder, could change what the program imports.
PROGRAM = (sys.executable, "-I", "-m", "jupyter_gpupool.cluster.kernel_host")
#: Capabilities to become another user, and their numbers in linux/capability.h.
_NEEDED = {"CAP_SETGID": 6, "CAP_SETUID": 7}
_KILL = "import os, sys; os.killpg(int(sys.argv[1]), int(sys.argv[2]))"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

#: The signals that an order may ask for.
_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1, signal.SIGUSR2,
                      signal.SIGHUP, signal.SIGQUIT, signal.SIGCONT, signal.SIGSTOP})  # fmt: skip


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Account:
    """A user of this machine, and the environment variables of the user's new kernels."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    environment: Mapping[str, str]


def switch_to(account: Account) -> tuple[list[str], dict[str, Any]]:
    """Return the words before a command and the ``Popen`` arguments that run it as a user."""
    if os.geteuid() != 0:
        return [], {}
    return [], {"user": account.uid, "group": account.gid, "extra_groups": account.groups}


def check_rights(node: str, status: Path = Path("/proc/self/status")) -> None:
    """Refuse to start kernels if this broker runs as root but cannot become another user."""
    if os.geteuid() != 0:
        return
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
    has = int(found[1], 16) if found else -1
    lacks = [name for name, bit in _NEEDED.items() if not has >> bit & 1]
    if lacks:
        raise RefusedError(
            f"The broker of {node} cannot start a kernel as another user, because its service does "
            f"not give the broker {' and '.join(lacks)}.",
            code=Code.NOT_THERE,
            next_step="Run `jupyter gpupool install-service` on that machine again: if "
            "c.GPUPool.cluster_identity is set, the new unit gives the broker these rights.",
        )


def talk(link: socket.socket, line: bytes, deadline: float) -> bytes:
    """Send a line; return the first line of the answer, cut off at ``deadline`` if necessary."""
    found = b""
    with suppress(OSError):
        link.settimeout(max(0.01, deadline - time.monotonic()))
        link.sendall(line)
        while b"\n" not in found and len(found) < MOST_BYTES:
            link.settimeout(max(0.01, deadline - time.monotonic()))
            part = link.recv(1 << 16)
            if not part:
                break
            found += part
    return found.partition(b"\n")[0]


def looked(status: Mapping[str, Any], kernels: Iterable[Any]) -> Mapping[str, Any]:
    """Return the part of ``status`` about those ``kernels`` that belong to the viewer."""
    wanted = {name for name in kernels if isinstance(name, str)}
    # Check the owner, because the status for an admin has the sessions of all users.
    sessions = [
        session for session in status["sessions"]
        if session["owner"] == status["user"] and session.get("kernel_id") in wanted
    ]  # fmt: skip
    used = {uuid for session in sessions for uuid in session["devices"]}
    return {
        "now": status["now"],
        "sessions": sessions,
        "gpus": [
            {name: device[name] for name in ("uuid", "index", "name", "emulated")}
            for device in status["devices"]
            if device["uuid"] in used
        ],
    }


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a program and its process group, and wait a short time for the program's end.

    The caller must not have reaped the program.

    The user of the program controls the program. So the program may be stopped, the program may
    ignore the end of its input, and its children may keep its output open.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    # If the process ends later, `subprocess` reaps it when it starts the next program.
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_PATIENCE)


class Hosting:
    """Carries out orders from other machines.

    Parameters
    ----------
    node:
        The name of this machine.
    authenticator:
        Checks credentials; None if this machine takes no orders.
    status:
        Returns the pool as a user may see it.
    """

    def __init__(
        self,
        core: Core,
        configuration: Configuration,
        node: str,
        authenticator: Authenticator | None,
        status: Callable[[Peer], Mapping[str, Any]],
    ) -> None:
        self._core = core
        self._status = status
        self._configuration = configuration
        self._node = node
        self._authenticator = authenticator
        #: By user and kernel: the process that this broker has started.
        self._started: dict[tuple[int, str], subprocess.Popen[bytes]] = {}
        #: For each kernel that is starting now: whether it must end as soon as it has started.
        self._starting: dict[tuple[int, str], bool] = {}
        #: By process id: the object that waits for the end of the process, and then reaps it.
        self._deaths: dict[int, Death] = {}
        #: By user: the number of threads that carry out an order now. The key -1 is for the threads
        #: that check a credential, because the user is not known before.
        self._working: Counter[int] = Counter()

    async def perform(self, credential: str) -> Message:
        """Carry out the order in a credential; return an ``ok`` message or an ``error`` message."""
        try:
            return {"type": "ok", **await self._perform(credential)}
        except GPUPoolError as error:
            return error_message(error, None)
        except (
            KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, OSError,
            subprocess.SubprocessError,
        ) as error:  # fmt: skip
            text = f"{self._node} did not carry out an order: {type(error).__name__}: {error}."
            return error_message(GPUPoolError(text, code=Code.INTERNAL), None)

    async def _perform(self, credential: str) -> Mapping[str, Any]:
        if self._authenticator is None:
            raise cannot(
                f"{self._node} runs no kernels for servers on other machines.",
                f"Ask the admin of {self._node} to set c.GPUPool.cluster_identity.",
            )
        check = self._authenticator.check
        found = await self._in_thread(-1, lambda: check(credential))
        order = read_order(found, self._node)
        kernel, do = str(order.get("kernel_id"))[:100], order.get("do")
        key = found.uid, kernel
        if do == "start":
            return await self._start(key, order, found)
        if do == "signal":
            return await self._signal(key, order.get("signal"))
        if do == "poll":
            return self._poll(key)
        if do == "look":
            return await self._look(found.uid, order.get("kernels"))
        if do == "tell" and str(order.get("request")) not in _TOLD:
            raise RefusedError(
                f"Another machine may not send {str(order.get('request'))[:40]!r}.",
                code=Code.BAD_REQUEST,
            )
        if do in ("log", "clean", "tell"):
            if do == "clean" and self._poll(key)["running"]:
                raise RefusedError("This kernel still runs.", code=Code.BAD_REQUEST)
            uid = found.uid
            return (await self._in_thread(uid, lambda: self._run_as(uid, order)))[0]
        raise RefusedError(f"There is no order {str(do)[:40]!r}.", code=Code.UNKNOWN_TYPE)

    async def _look(self, uid: int, kernels: Any) -> Mapping[str, Any]:
        """Return the sessions of a user's kernels, as ``status`` shows them, and their GPUs."""
        if not isinstance(kernels, list) or len(kernels) > MOST_LOOKED:
            raise RefusedError(
                f"An order may ask about at most {MOST_LOOKED} kernels.", code=Code.BAD_REQUEST
            )
        account = await self._in_thread(uid, lambda: self._account(uid))
        return looked(self._status(Peer(0, uid, account.gid)), kernels)

    def close(self) -> None:
        """Stop watching the kernels, which continue to run."""
        for death in self._deaths.values():
            death.close()
        self._deaths.clear()

    async def _in_thread(self, uid: int, work: Callable[[], _T]) -> _T:
        """Run ``work`` in a new thread; return its result.

        The thread may hang, because a user's files, processes and account are on systems that may
        hang. So the broker limits the number of such threads. It does not wait for them when it
        ends.
        """
        in_all = self._working.total() - self._working[-1]
        own = self._working[uid]
        if uid == -1:
            full = own >= MOST_CHECKS
        else:
            full = own >= MOST_OF_USER or in_all >= MOST
        if full:
            raise RefusedError(
                f"{self._node} carries out too many orders now ({max(own, 0)} of this kind, and "
                f"{in_all} of all users together).",
                code=Code.TOO_MANY,
                next_step="Try again later.",
            )
        self._working[uid] += 1
        try:
            return await nss.ask(work)
        finally:
            self._working[uid] -= 1
            if not self._working[uid]:
                del self._working[uid]

    # ------------------------------------------------------------------ kernels

    async def _start(
        self, key: tuple[int, str], order: Message, found: CheckedCredential
    ) -> Mapping[str, Any]:
        if key in self._starting or self._poll(key)["running"]:
            raise RefusedError("This kernel runs already.", code=Code.DUPLICATE)
        self._starting[key] = False
        try:
            answer, process = await self._in_thread(
                found.uid, lambda: self._run_as(found.uid, order)
            )
            if self._starting[key]:
                await nss.ask(lambda: end(process))
                raise RefusedError(
                    "This kernel was ended while it was starting.", code=Code.CANCELLED
                )
        finally:
            del self._starting[key]
        self._forget_old()
        self._started[key] = process
        self._watch(process)
        return {**answer, "pid": process.pid}

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Reap a kernel when it ends, even if no order asks for it again."""

        def reap() -> None:
            self._deaths.pop(process.pid, None)
            process.poll()

        known = identify(process.pid)
        if known is None:
            reap()  # the kernel has ended already
        else:
            self._deaths[process.pid] = Death(known, reap)

    def _forget_old(self) -> None:
        """Keep the exit codes of KEPT ended kernels, and forget those that started first."""
        ended = [key for key, process in self._started.items() if process.poll() is not None]
        for key in ended[:-KEPT]:
            del self._started[key]

    def _poll(self, key: tuple[int, str]) -> dict[str, Any]:
        """Return whether a kernel runs, and its exit code.

        The exit code is None while the kernel runs, or if the code is unknown.
        """
        if key in self._starting:
            return {"running": True, "code": None}
        process = self._started.get(key)
        if process is not None:
            code = process.poll()
            return {"running": code is None, "code": code}
        return {"running": self._recovered(key) is not None, "code": None}

    def _recovered(self, key: tuple[int, str]) -> ProcessId | None:
        """Return the process of a living kernel that an earlier broker has started, or None."""
        for session in self._core.sessions:
            process = session.process
            if (session.uid, session.kernel_id) == key and process is not None and alive(process):
                return process
        return None

    async def _signal(self, key: tuple[int, str], number: Any) -> dict[str, Any]:
        """Send a signal to a kernel and its process group, with the rights of its user."""
        if number not in _SIGNALS:
            raise RefusedError("An order cannot send this signal.", code=Code.BAD_REQUEST)
        if key in self._starting:
            if number not in (signal.SIGKILL, signal.SIGTERM):
                raise RefusedError("This kernel has not started yet.", code=Code.AGAIN)
            # The kernel must end as soon as it has started. A server sends this signal if it got no
            # answer to its ``start`` order, or no longer wants the kernel.
            self._starting[key] = True
            return {"running": True}
        process = self._started.get(key)
        pid = None
        if process is not None:
            pid = process.pid if process.poll() is None else None
        elif (recovered := self._recovered(key)) is not None:
            pid = recovered.pid
        if pid is not None:
            found = pid
            await self._in_thread(key[0], lambda: self._kill_as(key[0], found, int(number)))
        return {"running": pid is not None}

    # ------------------------------------------------------------------ in a thread

    def _kill_as(self, uid: int, pid: int, number: int) -> None:
        """Send a signal with the rights of a user.

        A child of a kernel may run as another user. The kernel's user has no right to send this
        child a signal, so the broker does not send it one either.
        """
        account = self._account(uid)
        prefix, switch = switch_to(account)
        process = subprocess.Popen(
            [*prefix, sys.executable, "-I", "-S", "-c", _KILL, str(pid), str(number)],
            env=dict(account.environment), cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, **switch,
        )  # fmt: skip
        try:
            process.wait(SIGNAL_PATIENCE)
        except subprocess.TimeoutExpired:
            end(process)
            raise RefusedError(
                f"{self._node} could not send a signal within {SIGNAL_PATIENCE:g} s.",
                code=Code.AGAIN,
                next_step="Try again.",
            ) from None

    def _run_as(
        self, uid: int, order: Message
    ) -> tuple[Mapping[str, Any], subprocess.Popen[bytes]]:
        """Run the program of an order as a user; return the program's answer and its process."""
        account = self._account(uid)
        check_rights(self._node)
        prefix, switch = switch_to(account)
        message = {
            "order": order,
            "machine": self._node,
            "socket": str(self._configuration.socket),
            "address": self._address() if order["do"] == "start" else "",
        }
        line = encode(message)
        # The program may wait for a file system that hangs, and its user may stop it. So every wait
        # below has a limit.
        deadline = time.monotonic() + PATIENCE
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = subprocess.Popen(
                    [*prefix, *PROGRAM], stdin=theirs.fileno(), stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    env=dict(account.environment), cwd="/", start_new_session=True, umask=0o022,
                    **switch,
                )  # fmt: skip
        except OSError as error:
            ours.close()
            raise RefusedError(
                f"On {self._node}, user id {uid} cannot run {sys.executable} ({error.strerror}).",
                code=Code.NOT_THERE,
                next_step="Install the broker in a folder that all users may read, such as "
                "/opt/gpupool. The service must give the broker CAP_SETUID and CAP_SETGID.",
            ) from None
        with ours:
            said = talk(ours, line, deadline)
        try:
            answer = decode(said)
        except GPUPoolError:
            why = f"in {PATIENCE:g} s"
            if time.monotonic() < deadline:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(END_PATIENCE)
                why = f"(exit code {process.returncode})"
            end(process)
            raise RefusedError(
                f"The program that becomes the kernel did not answer on {self._node} {why}.",
                code=Code.START_FAILED,
                next_step="The log of the broker there may say why.",
            ) from None
        if answer["type"] == "error" or order["do"] != "start":
            end(process)
        if answer["type"] == "error":
            raise RefusedError(
                str(answer.get("message")), code=Code.of(answer.get("code"), Code.REFUSED),
                next_step=str(answer.get("next_step", "")),
                details=answer["details"] if isinstance(answer.get("details"), dict) else {},
            )  # fmt: skip
        return {k: v for k, v in answer.items() if k not in ("type", "v", "id")}, process

    def _account(self, uid: int) -> Account:
        """Return the account of a user; refuse a user for whom this broker may start no kernel."""
        own = os.geteuid()
        if uid == 0 or own not in (0, uid):
            # A kernel that runs as root could do everything on this machine. A broker that runs as
            # a user cannot start a kernel as another user.
            raise RefusedError(
                f"The broker of {self._node} starts no kernel for user id {uid}.",
                code=Code.NOT_ALLOWED,
                next_step="A broker that runs as root starts kernels for all users but root.",
            )
        least = self._configuration.settings.cluster_min_uid
        if own == 0 and uid < least:
            raise RefusedError(
                f"The broker of {self._node} starts no kernel for user id {uid}, because ids below "
                f"{least} belong to services of the system.",
                code=Code.NOT_ALLOWED,
                next_step="If people have such ids, lower c.GPUPool.cluster_min_uid there.",
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
        """Return the address at which other machines reach this machine."""
        configured = self._configuration.settings.cluster_address
        if configured:
            return configured
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                # ``connect`` sends no packet on this socket. It only finds the source address of
                # packets to another network.
                probe.connect(("192.0.2.1", 9))
                return str(probe.getsockname()[0])
            except OSError:
                raise RefusedError(
                    f"The broker of {self._node} does not know the address of its machine.",
                    code=Code.NOT_THERE,
                    next_step="Set c.GPUPool.cluster_address there.",
                ) from None
