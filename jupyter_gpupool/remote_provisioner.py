# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Starts a kernel on the machine that the cluster chooses, for a server on another machine.

A kernelspec selects this provisioner with ``"provisioner_name": "gpupool-remote-provisioner"``;
kernels of other kernelspecs never import this module. The broker on the chosen machine starts the
kernel and reports its state; this server has no process for it. A machine that does not answer is
*unreachable*, but its kernel probably still runs. So this module never reports such a kernel as
dead; otherwise Jupyter would start a second kernel beside it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence, TypeVar

import zmq
from jupyter_client.provisioning import KernelProvisionerBase
from traitlets import List, Unicode

from .client import Client
from .cluster.authenticators import authenticator
from .cluster.identity import Authenticator, cannot, order_text
from .cluster.kernel_host import PORTS
from .deadlines import in_own_thread
from .errors import Code, GPUPoolError, RefusedError
from .launcher import REMOTE_PROVISIONER, options_of
from .provisioner import GPUPoolProvisioner, KernelNotStarted

#: An order may take at most PATIENCE seconds. Two polls of the kernel are at least BETWEEN seconds
#: apart.
PATIENCE, BETWEEN = 70.0, 0.3
_T = TypeVar("_T")

#: The exit code to report if the real one is unknown, because the broker that started the kernel
#: has been replaced.
UNKNOWN = 1

#: After an error with one of these codes, this server does not know whether the other machine has
#: executed the order.
_UNKNOWN_END = frozenset({
    Code.UNREACHABLE, Code.BROKER_UNAVAILABLE, Code.BROKER_SILENT, Code.TOO_LONG, Code.INTERNAL,
})  # fmt: skip


class GPUPoolRemoteProvisioner(GPUPoolProvisioner):
    """Starts a kernel on another machine of the cluster.

    It has the same options as the local provisioner.
    """

    model = Unicode(
        "",
        help="""Words from the name of the GPU that the kernel needs. `jupyter gpupool status
        --cluster --json` shows the names. The kernel starts only on a machine where each GPU has
        these words in its name. Example: c.GPUPoolRemoteProvisioner.model = "H100" """,
    ).tag(config=True)
    data = List(
        Unicode(),
        help="""Folders that the kernel works with, besides its working folder. Among machines with
        equal room and equal queues, the cluster prefers the machine whose c.GPUPool.cluster_data
        has the most of these folders. Example:
        c.GPUPoolRemoteProvisioner.data = ["/scratch/imagenet"]""",
    ).tag(config=True)

    _known = options_of(REMOTE_PROVISIONER)
    _node: str = ""
    _ports: Mapping[str, int] = {}
    _identity: str = ""
    #: Whether the kernel was started, and its broker has not yet reported the kernel's end.
    _runs: bool = False
    _code: int | None = None
    _asked: float = float("-inf")
    _silent: bool = False
    _ends: bool = False

    # ------------------------------------------------------------------ called by jupyter_client

    @property
    def has_process(self) -> bool:
        """Whether a kernel was started, and its broker has not yet reported the kernel's end."""
        return self._runs

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Choose a machine; a restart keeps the kernel's machine. Called before each (re)start.

        Raises
        ------
        KernelNotStarted
            If no machine can take the kernel, or the previous kernel may still run.
        """
        await self._check_ended()
        if not self._node:
            try:
                folder = str(kwargs.get("cwd") or Path.cwd())
                answer = await self._in_thread(self._place, folder)
            except GPUPoolError as error:
                raise KernelNotStarted(error) from error
            self._node, self._identity = str(answer["node"]), str(answer["identity"])
            self.log.info("GPU pool: %s starts on %s", self.kernel_spec.display_name, self._node)
            for name, lacks in answer["considered"]:
                if lacks:
                    self.log.info("GPU pool: the kernel cannot start on %s: %s", name, lacks)
        kwargs["cmd"] = list(self.kernel_spec.argv)
        found = await KernelProvisionerBase.pre_launch(self, **kwargs)
        return dict(found)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:  # noqa: ARG002
        """Make the other machine start the kernel; return the kernel's connection information."""
        try:
            secrets = self._secrets()
            found = await self._in_thread(self._send, {
                "do": "start", "kernel": self.parent.kernel_name,
                "cwd": str(kwargs.get("cwd") or Path.cwd()),
                "label": self._label(kwargs.get("env") or {}),
                "options": self._options(), "ports": dict(self._ports), "secrets": secrets,
            })  # fmt: skip
        except GPUPoolError as error:
            if error.code in _UNKNOWN_END:
                await self._undo_start()
            elif not self._ports:
                self._node = ""
            raise KernelNotStarted(error) from error
        self._runs, self._ends, self._code, self._silent = True, False, None, False
        self._asked = time.monotonic()
        self.cwd = kwargs.get("cwd")
        self.pid = int(found["pid"])
        self._ports = {name: int(found[name]) for name in PORTS}
        if found.get("note"):
            self.log.warning(
                "GPU pool: %s runs without a GPU: %s.", self.kernel_spec.display_name, found["note"]
            )
        self.connection_info = {
            "ip": found["ip"], "transport": "tcp", **self._ports,
            **secrets, "key": secrets["key"].encode(),
        }  # fmt: skip
        return self.connection_info

    async def poll(self) -> int | None:
        """Return None while the kernel runs or its machine is unreachable, else its exit code."""
        if not self._runs:
            return 0 if self._code is None else self._code
        if time.monotonic() - self._asked < BETWEEN:
            return None
        self._asked = time.monotonic()
        try:
            found = await self._in_thread(self._send, {"do": "poll"})
        except GPUPoolError as error:
            if not self._silent:
                self.log.warning("GPU pool: %s The kernel counts as running.", error)
            self._silent = True
            return None
        self._silent = False
        if found["running"]:
            return None
        self._runs = False
        self._code = UNKNOWN if found["code"] is None else int(found["code"])
        if not self._ends:
            await self._show_log()
        return self._code

    async def wait(self) -> int | None:
        """Wait until the kernel has ended; return its exit code."""
        while (code := await self.poll()) is None:
            await asyncio.sleep(BETWEEN)
        return code

    async def send_signal(self, signum: int) -> None:
        """Make the kernel's broker send a signal to the kernel and its children."""
        if not self._runs:
            return
        try:
            await self._in_thread(self._send, {"do": "signal", "signal": int(signum)})
        except GPUPoolError as error:
            if self.parent.shutting_down and signum == signal.SIGINT:
                # Jupyter begins a shutdown with an interrupt. The shutdown must succeed even if the
                # kernel's machine does not answer.
                self.log.warning(
                    "GPU pool: the kernel on %s was not interrupted: %s", self._node, error
                )
                return
            raise KernelNotStarted(error) from error

    async def kill(self, restart: bool = False) -> None:
        """Kill the kernel; if its machine is unreachable, the kernel continues to run."""
        await self._end(signal.SIGKILL, restart)

    async def terminate(self, restart: bool = False) -> None:
        """Ask the kernel to end."""
        await self._end(signal.SIGTERM, restart)

    async def shutdown_requested(self, restart: bool = False) -> None:  # noqa: ARG002
        """Note that the kernel has been asked to end."""
        self._ends = True

    async def cleanup(self, restart: bool = False) -> None:
        """Remove the kernel's files, after its end."""
        if restart or not self._node:
            return
        if await self.poll() is None:
            # The kernel may still run, so keep its machine and its ports. Without them, a restart
            # would start a second kernel beside this kernel.
            self.log.warning("GPU pool: the kernel on %s may still run", self._node)
            return
        try:
            await self._in_thread(self._send, {"do": "clean"})
        except GPUPoolError as error:
            self.log.debug("GPU pool: the kernel's files were not removed: %s", error)
        self._node, self._ports = "", {}

    async def get_provisioner_info(self) -> dict[str, Any]:
        """Return the data with which a new server can take over this kernel."""
        info = await KernelProvisionerBase.get_provisioner_info(self)
        return {
            **info, "pid": self.pid, "gpupool_node": self._node, "gpupool_ports": self._ports,
            "gpupool_identity": self._identity, "gpupool_socket": str(self._socket or ""),
        }  # fmt: skip

    async def load_provisioner_info(self, provisioner_info: dict[str, Any]) -> None:
        """Take over the kernel that the data of :meth:`get_provisioner_info` describes."""
        await KernelProvisionerBase.load_provisioner_info(self, provisioner_info)
        self.pid = provisioner_info["pid"]
        self._node = str(provisioner_info["gpupool_node"])
        self._ports = dict(provisioner_info["gpupool_ports"])
        self._identity = str(provisioner_info["gpupool_identity"])
        socket = provisioner_info["gpupool_socket"]
        self._socket = Path(socket) if socket else None
        self._runs = bool(self._node)

    # ------------------------------------------------------------------ called by the extension

    @property
    def node(self) -> str:
        """The machine of the kernel; empty until a machine is chosen."""
        return self._node

    async def look(self, kernels: Sequence[str]) -> Mapping[str, Any]:
        """Ask this kernel's machine about ``kernels``; return ``now``, ``sessions`` and ``gpus``.

        Raises
        ------
        GPUPoolError
            If that machine does not answer.
        """
        return await self._in_thread(self._send, {"do": "look", "kernels": [*kernels]})

    async def tell(self, request: str, session: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Send this kernel's broker a request about one of its sessions; return the answer.

        Raises
        ------
        GPUPoolError
            If the broker refuses, or its machine does not answer.
        """
        found = await self._in_thread(
            self._send, {"do": "tell", "request": request, "session": session, "fields": {**fields}}
        )
        return dict(found["answer"])

    # ------------------------------------------------------------------ the broker

    @staticmethod
    async def _in_thread(function: Callable[..., _T], *args: Any) -> _T:
        """Call a function in a thread, because the call blocks until another machine answers."""
        return await in_own_thread(partial(function, *args), "gpupool-order")

    async def _check_ended(self) -> None:
        """Refuse a start while the previous kernel may still run: two kernels would run at once."""
        self._asked = float("-inf")
        if self._runs and await self.poll() is None:
            raise KernelNotStarted(RefusedError(
                f"The kernel on {self._node} has not ended, or {self._node} does not answer.",
                code=Code.UNREACHABLE,
                next_step="Try again later. Two kernels at once could change the same files.",
            ))  # fmt: skip

    async def _undo_start(self) -> None:
        """Kill the kernel if nobody knows whether its start succeeded: the kernel may run."""
        self._runs, self._ends, self._code, self._asked = True, True, None, float("-inf")
        await self._end(signal.SIGKILL, restart=False)
        if await self.poll() is not None and not self._ports:
            self._node = ""

    async def _end(self, number: int, restart: bool) -> None:
        self._ends = True
        try:
            await self.send_signal(number)
        except KernelNotStarted as error:
            if restart:
                raise
            self.log.warning("GPU pool: the kernel on %s was not ended: %s", self._node, error)

    async def _show_log(self) -> None:
        try:
            found = await self._in_thread(self._send, {"do": "log"})
        except GPUPoolError as error:
            self.log.debug("GPU pool: the kernel's log cannot be read: %s", error)
            return
        self.log.warning("GPU pool: the kernel on %s ended:\n%s", self._node, found["log"])

    def _place(self, folder: str) -> Mapping[str, Any]:
        wanted = {k: v for k, v in self._wanted().items() if k in ("memory", "devices")}
        data = [*self.data, folder]
        try:
            answer, self._socket = self._client.ask("place", **wanted, model=self.model, data=data)
        finally:
            self._client.close()
        return answer

    def _send(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send the kernel's machine an order; return its broker's answer."""
        socket = self._find_again(self._socket) if self._socket else self._find_broker()
        # The brokers run as the owner of the socket. Only this user can read the credential.
        identity = self._authenticator(socket.stat().st_uid)
        text = order_text(self._node, {**order, "kernel_id": self.kernel_id})
        # Do not repeat the order on another connection: each credential is valid only once.
        with Client(socket) as client:
            answer = client.call(
                "order", node=self._node, credential=identity.seal(text), timeout=PATIENCE
            )
        found: Mapping[str, Any] = answer["result"]
        return found

    def _authenticator(self, reader: int) -> Authenticator:
        found = authenticator(self._identity, reader=reader)
        if found is None:
            raise cannot(
                "This cluster cannot identify users, so no kernel can start on another machine.",
                "Ask an admin to set c.GPUPool.cluster_identity on every machine.",
            )
        return found

    def _secrets(self) -> dict[str, str]:
        """Return the keys of the kernel's connection. A restarted kernel gets the same keys."""
        manager = self.parent
        if not zmq.has("curve") or not hasattr(manager, "curve_publickey"):
            raise RefusedError(
                "This server cannot encrypt messages to a kernel on another machine.",
                code=Code.NO_CURVE,
                next_step="Install jupyter_client 8.9 or newer, and a pyzmq with CurveZMQ.",
            )
        if manager.curve_publickey is None:
            manager.curve_publickey, manager.curve_secretkey = zmq.curve_keypair()
        return {
            "key": manager.session.key.decode(),
            "signature_scheme": manager.session.signature_scheme,
            "curve_publickey": manager.curve_publickey.decode(),
            "curve_secretkey": manager.curve_secretkey.decode(),
        }

    def _options(self) -> dict[str, Any]:
        beside = {
            "attach": self.attach, "group": self.group, "model": self.model, "data": [*self.data]
        }  # fmt: skip
        return {**self._wanted(), **{name: value for name, value in beside.items() if value}}
