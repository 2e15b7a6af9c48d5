# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Messages of a provisioner: open a kernel's session, name its process, close the session."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Callable, Mapping

from ... import procfs
from ...config.settings import usable_attach
from ...containers.content import Content
from ...devices import Devices
from ...endpoint import MACHINE_SOCKET
from ...errors import Code, RefusedError
from ...pool import events as e
from ...pool.limits import blame_default, default_request, fit_unasked
from ...pool.model import Refusal, Request
from ...protocol import DEVICES_VARIABLE, Message
from ...states import POLICIES
from ..configuration import Configuration
from ..core import Core, refused
from ..gpu.actions import DeviceActions
from ..lifecycle import Lifecycle
from ..membership import Memberships
from ..pages.control import ControlPages
from ..pages.hints import Homes
from ..pages.setup import GuardSetup
from ..store.records import request_to_json
from ..transport.connection import Connection
from .agent import AgentMessages
from .guard import GuardMessages
from .parsing import MAX_NAME, acting, check_may_act, named, note_refusal, read_request


class ProvisionerMessages:
    """Handles ``open``, ``launched``, ``retire`` and ``close``.

    Parameters
    ----------
    environment:
        The variables that each kernel of this machine gets, see ``machine_environment``. The
        variables for the kernel's own devices are not among them.
    no_device:
        Why no device was found; "" if there are devices.
    content:
        What this machine gives to containers; None if the broker serves no containers.
    """

    def __init__(
        self,
        core: Core,
        configuration: Configuration,
        *,
        lifecycle: Lifecycle,
        memberships: Memberships,
        actions: DeviceActions,
        service: Devices,
        pages: ControlPages,
        setup: GuardSetup,
        homes: Homes,
        agent: AgentMessages,
        guard: GuardMessages,
        environment: Mapping[str, str],
        no_device: str,
        content: Content | None = None,
    ) -> None:
        self._core = core
        self._configuration = configuration
        self._lifecycle = lifecycle
        self._memberships = memberships
        self._learning: set[asyncio.Task[None]] = set()
        self._actions = actions
        self._service = service
        self._pages = pages
        self._setup = setup
        self._homes = homes
        self._environment = dict(environment)
        self._no_device = no_device
        self._content = content
        #: By type of message: the method for a message that a kernel may send before its server
        #: sends ``launched``.
        self._early: dict[str, Callable[[Connection, Message], None]] = {
            "hello": agent.hello, "attach": guard.attach,
        }  # fmt: skip

    def open(self, connection: Connection, message: Message) -> None:
        if self._memberships.is_known(connection.peer.uid):
            self._open_now(connection, message)
            return
        task = asyncio.get_running_loop().create_task(self._learn_first(connection, message))
        self._learning.add(task)
        task.add_done_callback(self._learning.discard)

    async def _learn_first(self, connection: Connection, message: Message) -> None:
        await self._memberships.learn(connection.peer.uid)
        if connection.open:
            connection.attempt(message, self._open_now)

    def _open_now(self, connection: Connection, message: Message) -> None:
        core, peer = self._core, connection.peer
        owner = self._memberships.owner(peer.uid, message.get("group") or "")
        if self._no_device:
            raise RefusedError(
                f"This pool has no GPU: {self._no_device}",
                code=Code.NO_DEVICE,
                next_step="`jupyter gpupool doctor` examines the machine.",
            )
        if self._configuration.stands_aside():
            raise RefusedError(
                f"This machine now has a broker for all users at {MACHINE_SOCKET}. Your own broker "
                "keeps its kernels, but takes no new ones.",
                code=Code.STANDS_ASIDE,
                next_step="Start the kernel from JupyterLab, or unset GPUPOOL_SOCKET.",
            )
        settings = self._configuration.settings
        most = settings.max_sessions_per_user
        if sum(1 for s in core.sessions if s.uid == peer.uid) >= most:
            raise RefusedError(
                f"You already have {most} sessions in this pool, and one user may have no more "
                "(c.GPUPool.max_sessions_per_user).",
                code=Code.TOO_MANY,
                next_step="Shut down kernels that you do not need, or ask your administrator.",
                details={"allowed": most},
            )
        attach = message.get("attach") or settings.attach
        if attach not in POLICIES:
            raise RefusedError(
                f"There is no attach policy {attach[:40]!r}; the policies are cell, manual and "
                "lazy.",
                code=Code.BAD_REQUEST,
            )
        fields = message.get("request", {})
        asked = named(fields)
        request = self._request(fields, owner.name, metered=True)
        session, token = core.sessions.new(owner, peer.uid, message["kernel_id"][:MAX_NAME])
        session.model = message.get("model", "")
        session.data = tuple(message.get("data", ()))
        session.home = self._homes.first(request)
        env = {
            **self._environment,
            **self._service.environment(session.home),
            DEVICES_VARIABLE: self._service.visible,
        }
        content = self._content if isinstance(session.uid, str) else None
        if content is not None:
            env = content.environment(env)
        guarded = (
            self._setup.environment(session, env, request.limit)
            if message.get("guarded", True)
            else self._setup.without(session)
        )
        if not guarded:
            # The kernel has no page, so the guard cannot ask for a lease at the first CUDA call. So
            # replace an attach policy that needs the guard.
            attach, _ = usable_attach(attach, False)
            request = self._request(fields, owner.name, metered=False)
        core.sessions.add(session)
        outcome: list[tuple[Refusal | None, str]] = []
        rid = f"open {session.id}"
        core.expect(rid, lambda refusal, note: outcome.append((refusal, note)))
        core.follow_clock()
        core.handle(
            e.SessionOpened(
                now=core.now(), session=session.id, owner=owner, request=request,
                attach=attach, label=message.get("label", "")[:MAX_NAME], rid=rid,
                lands=bool(guarded), gated=bool(guarded),
            )
        )  # fmt: skip
        core.forget(rid)
        if outcome and outcome[0][0] is not None:
            core.sessions.remove(session.id)
            self._pages.remove(session)
            refusal = blame_default(outcome[0][0], asked)
            note_refusal(core, None, "open", refusal, owner=owner.name)
            raise refused(refusal)
        session.opener = connection
        connection.opened.add(session.id)
        self._lifecycle.expect_launch(session)
        core.note(
            "open",
            session,
            detail={
                "label": message.get("label", "")[:MAX_NAME],
                "kernel_id": session.kernel_id,
                "request": request_to_json(request),
                "attach": attach,
                "group": owner.group,
            },
        )
        core.commit()
        env |= guarded
        env |= {
            "GPUPOOL_SOCKET": str(self._configuration.socket),
            "GPUPOOL_SESSION": session.id,
            "GPUPOOL_TOKEN": token,
            "GPUPOOL_ATTACH": attach,
        }
        connection.answer(
            message.get("id"),
            {
                "session": session.id,
                "token": token,
                "attach": attach,
                "request": request_to_json(request),
                "group": owner.group,
                "env": env,
                # None for a kernel in a container: its image has no configuration of its own that
                # could differ from the broker's.
                "config": None if content else self._configuration.shown(peer),
                "pid": os.getpid(),
                "broker": {"machine_wide": self._configuration.machine_wide},
                "retire": bool(self._service.hazard),
            },
        )

    def _request(self, fields: Mapping[str, Any], owner: str, *, metered: bool) -> Request:
        """Return the request of a new kernel. ``metered`` says whether it runs under the guard."""
        pool = self._core.pool
        capacities = [device.capacity for device in pool.device_views()]
        default = default_request(pool.settings, capacities, metered=metered)
        found = read_request(default, fields)
        return fit_unasked(found, named(fields), pool.settings, owner, capacities)

    def launched(self, connection: Connection, message: Message) -> None:
        session = acting(self._core, self._configuration.access, connection, message)
        peer, named = connection.peer, message["pid"]
        pid = self._pages.translated(session, named, peer.pid) if named > 0 else 0
        process = procfs.identify(pid) if pid > 0 else None
        if process is None:
            raise RefusedError(f"There is no process {named}.", code=Code.NO_PROCESS)
        if session.process == process:
            connection.answer(message.get("id"))
            return
        if session.process is not None:
            raise RefusedError(
                f"Session {session.id} already has process {session.process.pid}.",
                code=Code.ALREADY_LAUNCHED,
                next_step="Open a separate session for each process.",
            )
        if not isinstance(session.uid, int):
            # Two containers may use the same user ids and process ids. So only the ancestors of a
            # process show to which user it belongs.
            starter = procfs.identify(peer.pid)
            if starter is None or not procfs.descends(pid, starter):
                raise RefusedError(
                    f"Process {named} is neither the sender of this message nor a child of it.",
                    code=Code.NOT_YOURS,
                )
        elif (uid := procfs.real_uid(pid)) != session.uid:
            raise RefusedError(
                f"Process {pid} belongs to user id {uid}, but the session belongs to user id "
                f"{session.uid}.",
                code=Code.NOT_YOURS,
            )
        other = self._core.sessions.of_process(process)
        if other is not None:
            raise RefusedError(
                f"Process {pid} already belongs to session {other.id}.", code=Code.ALREADY_LAUNCHED
            )
        session.process = process
        session.opener = None
        connection.opened.discard(session.id)
        if session.launch_timer is not None:
            session.launch_timer.cancel()
            session.launch_timer = None
        self._lifecycle.watch_process(session, process)
        self._core.dirty(session.id)
        self._core.commit()
        connection.answer(message.get("id"))
        for sender, waiting in session.take_early():
            if sender.open:
                sender.attempt(waiting, self._early[waiting["type"]])

    def retire(self, connection: Connection, message: Message) -> None:
        """Make a kernel safe to kill, because its server is about to kill it."""
        session = acting(self._core, self._configuration.access, connection, message)
        request = message.get("id")
        self._actions.retire_and_end(
            session, lambda safe: connection.answer(request, {"safe": safe})
        )

    def close(self, connection: Connection, message: Message) -> None:
        session = self._core.sessions.find(message["session"])
        if session is not None:
            check_may_act(self._configuration.access, connection, session)
            self._lifecycle.end(
                session, message.get("reason", "")[:MAX_NAME] or "closed by its server"
            )
        connection.answer(message.get("id"))
