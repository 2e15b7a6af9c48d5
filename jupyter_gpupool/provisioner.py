# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Opens a session in the pool before a kernel starts, and closes the session when the kernel ends.

One object serves a kernel through all its restarts, until the kernel's end. jupyter_client makes
these calls:

- start: ``pre_launch``, ``launch_kernel``, ``post_launch``;
- restart: ``shutdown_requested(True)``, ``cleanup(True)``, then as for a start;
- automatic restart after a crash: ``cleanup(True)``, then as for a start;
- shutdown, culling: ``shutdown_requested(False)``, ``cleanup(False)``.

jupyter_client passes ``restart=True`` only in the calls that this list shows with ``True``. It may
call ``cleanup`` twice, or without a start.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, TypeVar

from jupyter_client.provisioning import LocalProvisioner
from tornado.web import HTTPError
from traitlets import Int, TraitError, TraitType, Unicode

from .client import Client, ClientAgain
from .config import load_settings
from .config.differences import not_logged, notice
from .endpoint import SOCKET_VARIABLE, START_TIMEOUT, check_socket
from .errors import BrokerUnavailable, Code, ConfigError, GPUPoolError, RefusedError
from .guard.install import without_guard
from .launcher import (
    NOTICE_VARIABLE,
    OPENED_VARIABLE,
    OPTIONS,
    check_options,
    enter_session,
    has_launcher,
    kernel_command,
    runs_ipykernel,
)
from .starting import answers, ensure_broker, revive
from .states import POLICIES
from .text import did_you_mean
from .units import format_bytes, parse_bytes

_Result = TypeVar("_Result")

#: One driver hangs if a kernel is killed after a suspend and resume. For this driver, the broker
#: suspends the kernel again before a kill. The suspend may take at most this many seconds.
RETIRE_TIMEOUT = 12.0


class Memory(TraitType[int, "int | str"]):
    """Bytes, or text like ``"12GiB"``; 0 leaves the choice to the pool's configuration."""

    info_text = "a size like '12GiB', or a number of bytes"
    default_value = 0

    def validate(self, obj: Any, value: Any) -> int:
        """Return the bytes; called by traitlets."""
        if value in (0, ""):
            return 0
        try:
            return parse_bytes(value)
        except ValueError as error:
            name = f"{type(obj).__name__}.{self.name}"
            raise ConfigError(f"{name}: {error}", next_step=_EXAMPLE) from None


_EXAMPLE = 'Write for example {"memory": "12GiB"} in the config of the kernelspec.'


class KernelNotStarted(GPUPoolError, HTTPError):
    """A kernel was not started.

    This is an HTTP error, too, because Jupyter Server shows users only HTTP errors.
    """

    def __init__(self, error: GPUPoolError) -> None:
        GPUPoolError.__init__(
            self,
            error.message,
            code=error.code,
            next_step=error.next_step,
            details=error.details,
        )
        # GPUPoolError.__init__ has called HTTPError.__init__ with the wrong arguments. So this call
        # comes last: it sets the text that users see.
        asked_wrongly = isinstance(error, (ConfigError, RefusedError))
        HTTPError.__init__(self, 400 if asked_wrongly else 503, str(error))
        self.reason = "The GPU pool refused the kernel"


class GPUPoolProvisioner(LocalProvisioner):  # type: ignore[misc]
    """Starts a kernel here, as the default provisioner does, with a session in the GPU pool.

    The kernelspec's options are the request that the kernel starts with. The pool's configuration
    decides what the kernel may get.
    """

    memory = Memory(
        0,
        help="""Device memory that the pool guarantees to the kernel while the kernel has a slice,
        in bytes or as text like "12GiB". Default: c.GPUPool.default_memory. Example:
        c.GPUPoolProvisioner.memory = "12GiB" """,
    ).tag(config=True)
    limit = Memory(
        0,
        help="""The most device memory that the kernel may have. A kernel that runs under the guard
        may grow up to this size while the GPU has room. In bytes or as text like "20GiB". Default:
        c.GPUPool.default_limit. Example: c.GPUPoolProvisioner.limit = "20GiB" """,
    ).tag(config=True)
    devices = Int(
        0,
        min=0,
        help="""Number of devices that the kernel has at the same time. The option memory counts
        for each of them. 0 (the default) leaves the number to the pool, which gives one device.
        Example: c.GPUPoolProvisioner.devices = 2""",
    ).tag(config=True)
    compute = Int(
        0,
        min=0,
        max=100,
        help="""Share of a device's compute time in per cent while others on it compute, too; under
        the guard, which lets kernels take turns. 0 (the default) leaves it to the pool: no bound.
        Example: c.GPUPoolProvisioner.compute = 50""",
    ).tag(config=True)
    priority = Unicode(
        "",
        help="""Priority class, one of c.GPUPool.priority_classes. Default:
        c.GPUPool.default_priority. Example: c.GPUPoolProvisioner.priority = "batch" """,
    ).tag(config=True)
    group = Unicode(
        "",
        help="""The kernel uses the share of this group, which must be one of c.GPUPool.groups. The
        kernel's user must be in the group. Default: the first group of the user. Example:
        c.GPUPoolProvisioner.group = "vision" """,
    ).tag(config=True)
    attach = Unicode(
        "",
        help="""When the kernel gets its slice: "lazy" (at its first CUDA call; as "cell" where the
        pool has no guard), "cell" (as a cell starts), "manual" (only on %gpu attach). Kernels that
        are not ipykernels know no cells and are "lazy" then, too. Default: c.GPUPool.attach.
        Example: c.GPUPoolProvisioner.attach = "manual" """,
    ).tag(config=True)
    broker_socket = Unicode(
        "",
        help="""Absolute path of a running broker's socket; a broker named here is not started.
        Default: c.GPUPool.socket, $GPUPOOL_SOCKET, /run/gpupool/broker.sock if it exists, else one
        of this user's own, which is started if need be. Example:
        c.GPUPoolProvisioner.broker_socket = "/run/gpupool/broker.sock" """,
    ).tag(config=True)

    #: The options that a kernelspec's ``config`` may have.
    _known: tuple[str, ...] = OPTIONS
    _socket: Path | None = None
    _session: str = ""
    #: Whether the driver hangs if this kernel is killed after a suspend and resume.
    _retires: bool = False
    #: The session's request before a restart. The user may have changed it with %gpu, and the
    #: restarted kernel keeps it.
    _request: Mapping[str, Any] | None = None

    def __init__(self, **kwargs: Any) -> None:
        # jupyter_client passes a kernelspec's options as arguments, and an unknown option has no
        # effect. So refuse unknown options here.
        spec = kwargs.get("kernel_spec")
        stanza = getattr(spec, "metadata", {}).get("kernel_provisioner", {}).get("config", {})
        try:
            check_options(stanza, getattr(spec, "display_name", "this kernel"), self._known)
            super().__init__(**kwargs)
        except GPUPoolError as error:
            raise KernelNotStarted(error) from error
        except TraitError as error:
            problem = ConfigError(f"An option of the Pooled GPU kernel is wrong: {error}")
            raise KernelNotStarted(problem) from error
        self._client = ClientAgain(self._find_broker, timeout=START_TIMEOUT)

    # ------------------------------------------------------------------ called by jupyter_client

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Open a session and prepare command and environment. Called before each (re)start.

        Raises
        ------
        KernelNotStarted
            If no broker answers, or the broker refuses. No kernel starts without a session.
        """
        await self._release("the kernel is started again")
        env = kwargs.get("env") or os.environ
        try:
            answer, socket = await self._in_thread(self._open, self._label(env))
        except GPUPoolError as error:
            raise KernelNotStarted(error) from error
        try:
            kwargs = await super().pre_launch(**kwargs)
            # This server may run in a session itself. The kernel must not use the page of the
            # server's session.
            environ = kwargs["env"] = without_guard(kwargs["env"])
            text = await self._in_thread(self._other_configuration, answer)
            if text:
                environ[NOTICE_VARIABLE] = text
            command, why_not = enter_session(kernel_command(kwargs["cmd"]), environ, answer, socket)
            kwargs["cmd"] = command
            if has_launcher(command):
                environ[OPENED_VARIABLE] = str(answer["session"])
            if why_not:
                self.log.warning(
                    "GPU pool: %s runs without a GPU: %s.", self.kernel_spec.display_name, why_not
                )
        except BaseException:
            await self._release("the kernel could not be prepared")
            raise
        return kwargs

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        """Start the process and report it to the broker. Called after ``pre_launch``."""
        try:
            info = await super().launch_kernel(cmd, **kwargs)
            await self._in_thread(self._launched, self.pid)
        except BaseException as error:
            await self.kill()
            await self._release("the kernel did not start")
            if isinstance(error, GPUPoolError):
                raise KernelNotStarted(error) from error
            raise
        return info

    async def shutdown_requested(self, restart: bool = False) -> None:
        """Make the kernel safe to kill, and save its request for a restart.

        Called while the kernel still runs.
        """
        await super().shutdown_requested(restart=restart)
        await self._retire()  # the driver may also hang when the kernel exits without a kill
        if restart and self._session and self._socket is not None:
            try:
                self._request = await self._in_thread(self._current_request, self._socket)
            except GPUPoolError as error:
                self.log.debug("GPU pool: the request before a restart is not known: %s", error)

    async def kill(self, restart: bool = False) -> None:
        """Kill the kernel; if the driver needs it, the broker suspends the kernel first."""
        await self._retire()
        await super().kill(restart=restart)

    async def terminate(self, restart: bool = False) -> None:
        """Send the kernel SIGTERM; if the driver needs it, the broker suspends the kernel first."""
        await self._retire()
        await super().terminate(restart=restart)

    async def _retire(self) -> None:
        """Let the broker make the kernel safe to kill, if this driver needs that.

        The broker may take at most :data:`RETIRE_TIMEOUT` seconds for this.
        """
        retires, self._retires = self._retires, False
        if not retires or not self._session or self._socket is None:
            return
        try:
            if not await self._in_thread(self._ask_to_retire, self._socket):
                self.log.warning("GPU pool: the kernel could not be suspended before its end")
        except GPUPoolError as error:
            self.log.warning("GPU pool: the kernel was not suspended before its end: %s", error)

    def _ask_to_retire(self, socket: Path) -> bool:
        with Client(socket) as client:
            answer = client.call("retire", session=self._session, timeout=RETIRE_TIMEOUT)
        return bool(answer.get("safe"))

    async def cleanup(self, restart: bool = False) -> None:
        """End the session: its slice goes back to the pool. Called when the kernel has ended."""
        try:
            await super().cleanup(restart=restart)
        finally:
            if not restart:
                self._request = None
            await self._release("restart" if restart else "shutdown")

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Return the data with which a new server can take over this kernel."""
        info = await super().get_provisioner_info()
        socket = str(self._socket) if self._socket else ""
        info.update({"gpupool_session": self._session, "gpupool_socket": socket})
        info["gpupool_retire"] = self._retires
        return dict(info)

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Take over the kernel that the data of :meth:`get_provisioner_info` describes."""
        await super().load_provisioner_info(provisioner_info)
        self._session = str(provisioner_info.get("gpupool_session", ""))
        self._retires = bool(provisioner_info.get("gpupool_retire"))
        socket = provisioner_info.get("gpupool_socket", "")
        self._socket = Path(socket) if socket else None

    # ------------------------------------------------------------------ the broker (in a thread)

    @staticmethod
    async def _in_thread(function: Callable[..., _Result], *args: Any) -> _Result:
        """Call a function that may block, without blocking the server's event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, partial(function, *args))

    def _open(self, label: str) -> tuple[Mapping[str, Any], Path]:
        """Open a session; return the broker's answer and the broker's socket."""
        if self.attach and self.attach not in POLICIES:
            raise ConfigError(
                f"GPUPoolProvisioner.attach is {self.attach!r}, which is no attach policy; the "
                f"policies are {', '.join(POLICIES)}.",
                next_step=did_you_mean(self.attach, POLICIES),
            )
        # The connection stays open until the kernel is launched. If this server dies before the
        # launch, the connection closes, and the broker ends the session.
        try:
            answer, socket = self._client.ask(
                "open",
                kernel_id=self.kernel_id or "",
                label=label,
                request=self._wanted(),
                attach=self._policy(),
                group=self.group or None,
            )
        except BaseException:
            self._client.close()
            raise
        self._socket = socket
        self._session = str(answer["session"])
        self._retires = bool(answer.get("retire"))
        memory = (answer.get("request") or {}).get("memory")
        self.log.info(
            "GPU pool: opened session %s for %s%s",
            self._session,
            label,
            f", which asks for {format_bytes(memory)}" if isinstance(memory, int) else "",
        )
        return answer, socket

    def _find_broker(self) -> Path:
        """Return the socket of a living broker."""
        if self.broker_socket:
            # Start no second broker: it would grant the same memory as the named broker.
            socket = Path(self.broker_socket)
            if not answers(socket):
                revive(socket)
            check_socket(socket)
            return socket
        return ensure_broker(self._pool_config(), self._configured_socket())

    def _other_configuration(self, answer: Mapping[str, Any]) -> str:
        """Return the notice about different configurations; "" if no notice is needed."""
        text = notice(self.config.get("GPUPool"), answer)
        if not_logged(text):
            self.log.warning("GPU pool: %s", text)
        return text

    def _launched(self, pid: int) -> None:
        # The broker may have restarted at another socket since the session was opened. So store the
        # socket at which the broker answers now.
        _, self._socket = self._client.ask("launched", session=self._session, pid=pid)
        self._client.close()

    def _current_request(self, socket: Path) -> Mapping[str, Any]:
        find = partial(self._find_again, socket)
        with closing(ClientAgain(find, timeout=START_TIMEOUT)) as client:
            return dict(client.call("request", session=self._session)["request"])

    def _find_again(self, socket: Path) -> Path:
        """Return the socket of this session's broker; restart that broker if it has died."""
        if not answers(socket) and not revive(socket):
            raise BrokerUnavailable(f"No GPU pool broker listens at {socket}.", code=Code.NO_BROKER)
        return socket

    def _close(self, socket: Path, session: str, reason: str) -> None:
        with Client(socket) as client:
            client.call("close", session=session, reason=reason)

    async def _release(self, reason: str) -> None:
        """Close the session if one is open.

        An error of the broker is only logged: the broker also notices the end of the process.
        """
        session, self._session = self._session, ""
        try:
            if session and self._socket is not None:
                await self._in_thread(self._close, self._socket, session, reason)
        except GPUPoolError as error:
            self.log.warning("GPU pool: session %s could not be closed: %s", session, error)
        finally:
            self._client.close()

    # ------------------------------------------------------------------ requests and addresses

    def _wanted(self) -> dict[str, Any]:
        if self._request is not None:
            return dict(self._request)
        asked = {
            "memory": self.memory,
            "limit": self.limit,
            "devices": self.devices,
            "compute": self.compute,
            "priority": self.priority,
        }
        return {name: value for name, value in asked.items() if value}

    def _policy(self) -> str | None:
        """Return the attach policy to ask for; None leaves the choice to the pool.

        A kernel without ipykernel has no agent, so neither a cell nor %gpu can attach its session.
        Only the guard can, so every policy except "manual" becomes "lazy".
        """
        if self.attach != "manual" and not runs_ipykernel(kernel_command(self.kernel_spec.argv)):
            return "lazy"
        return self.attach or None

    def _label(self, env: Mapping[str, str]) -> str:
        """Return the kernel's name for people: the name of its notebook or of its kernelspec."""
        return Path(env.get("JPY_SESSION_NAME", "")).name or str(self.kernel_spec.display_name)

    def _pool_config(self) -> dict[str, Any] | None:
        """Return the section GPUPool of the server's configuration files and command line."""
        section = self.config.get("GPUPool")
        return {"GPUPool": dict(section)} if section else None

    def _configured_socket(self) -> str:
        section = self.config.get("GPUPool") or {}
        configured = str(section.get("socket", "") or "")
        if configured or os.environ.get(SOCKET_VARIABLE):
            return configured
        # nbclient and consoles have not read the server's configuration files, so read them here.
        return "" if section else load_settings().socket
