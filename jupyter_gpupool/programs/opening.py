# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A session for a program: its request, its opening, and the environment of its process."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Mapping

from ..client import ClientAgain
from ..errors import Code, RefusedError
from ..guard.install import remember_devices, without_guard
from ..kernel.frameworks import show_devices
from ..kernel.link import SessionLink
from ..launcher import OUTER_VARIABLES, START_TIMEOUT, living_broker, merge_environment
from ..startrecord import kernel_environment
from ..units import LEAST_BYTES, parse_bytes

#: The environment variable in which a program finds its name. ``jupyter gpupool run`` sets it.
NAME_VARIABLE = "GPUPOOL_NAME"

#: A service manager writes the pid of its service into these variables. If ``jupyter gpupool run``
#: is the service, the program gets its own pid in them, instead of the pid of ``run``.
_OWN_NUMBER = ("LISTEN_PID", "WATCHDOG_PID")


@dataclass(frozen=True)
class Asked:
    """What a program asks of the pool. An empty value or 0 means the pool's default."""

    memory: int = 0
    limit: int = 0
    devices: int = 0
    compute: int = 0
    priority: str = ""
    #: The group whose share the session uses. A session can change its request but not its group,
    #: so the group is no field of the request.
    group: str = ""

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request that have a value."""
        names = ("memory", "limit", "devices", "compute", "priority")
        return {name: value for name in names if (value := getattr(self, name))}


def read_size(text: str | int, what: str) -> int:
    """Return, in bytes, the size that a user has written; 0 if ``text`` is empty or 0.

    Raises
    ------
    RefusedError
        If ``text`` is not a size.
    """
    if text in ("", 0):
        return 0
    try:
        found = parse_bytes(text)
        if found < LEAST_BYTES:
            raise ValueError(f"{text} is less than 1 MiB. Write a size such as '8GiB'.")
    except ValueError as error:
        raise RefusedError(f"The {what} is wrong: {error}", code=Code.BAD_REQUEST) from None
    return found


@dataclass(frozen=True)
class ProgramSession:
    """An open session. The broker knows its process."""

    socket: Path
    answer: Mapping[str, Any]

    @property
    def id(self) -> str:
        return str(self.answer["session"])

    @property
    def memory(self) -> int:
        """Bytes of the slice that the session asks for."""
        return int((self.answer.get("request") or {}).get("memory") or 0)

    @property
    def guarded(self) -> bool:
        """Whether the guard makes the program's CUDA calls wait while there is no slice."""
        return "GPUPOOL_PAGE" in self.answer["env"]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return ``environ`` with the variables of the session, its devices and the guard."""
        env = dict(environ)
        remember_devices(env)
        merge_environment(env, self.answer["env"])
        env.update(kernel_environment(self.socket))
        return env

    def link(self, **options: Any) -> SessionLink:
        """Return a connection to the session as a member. The caller must start it."""
        return SessionLink(
            self.socket,
            self.id,
            str(self.answer["token"]),
            attach=str(self.answer["attach"]),
            environ=kernel_environment(self.socket),
            member=True,
            **options,
        )


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables of a session.

    This process may be in a session. A program with a new session must not get the variables of
    that session.
    """
    env = without_guard(environ)
    for name in (*OUTER_VARIABLES, NAME_VARIABLE):
        env.pop(name, None)
    return env


def open_session(
    asked: Asked,
    *,
    label: str,
    process: Callable[[], int],
    attach: str | None,
    socket: str = "",
    guarded: bool = True,
) -> ProgramSession:
    """Open a session for a process, and report the process to the broker.

    If no broker runs, this function starts one. ``process`` returns the pid of the process; this
    function calls it when the session is open. ``attach`` is the attach policy; None means the
    pool's policy. ``guarded`` is False for a process that has already loaded the driver.

    Raises
    ------
    RefusedError
        If the pool can never grant the request, or does not allow it.
    BrokerUnavailable
        If there is no broker, and no broker can be started.
    """
    with closing(ClientAgain(lambda: living_broker(socket), timeout=START_TIMEOUT)) as client:
        answer, path = client.ask(
            "open",
            kernel_id="",
            label=label,
            request=asked.fields(),
            attach=attach,
            group=asked.group or None,
            **({} if guarded else {"guarded": False}),
        )
        client.call("launched", session=answer["session"], pid=process())
        return ProgramSession(path, answer)


def with_devices(env: Mapping[str, str], link: SessionLink) -> dict[str, str]:
    """Return ``env`` with the devices of the session's present slice."""
    found = dict(env)
    show_devices([piece.device for piece in link.slices], found)
    return found


def numbered(env: Mapping[str, str], parent: int) -> dict[str, str]:
    """Return ``env`` with this process's pid in place of the pid ``parent``.

    Only the variables in :data:`_OWN_NUMBER` change.
    """
    found = dict(env)
    for name in _OWN_NUMBER:
        if found.get(name) == str(parent):
            found[name] = str(os.getpid())
    return found
