# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A broker that answers as the test decides: it can queue, refuse, delay, or die.

The broker uses the real protocol on a real socket. It checks every request as the real broker
does, and records the request. If the test sets no script for a kind of request, the broker grants
it at once.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable

from jupyter_gpupool.broker.request_fields import check_request
from jupyter_gpupool.errors import GPUPoolError, ProtocolError, RefusedError
from jupyter_gpupool.protocol import (
    MAX_LINE,
    Message,
    decode,
    encode,
    error_message,
)

GiB = 1 << 30
DEVICE = "GPU-5c21ed00-0000-0000-0000-000000000001"
OTHER_DEVICE = "GPU-5c21ed00-0000-0000-0000-000000000002"

#: A script gets a message. To answer it, the script returns the answer's fields, or raises a
#: refusal. If it returns None, the test answers later (see ``ScriptedBroker.answer``).
Script = Callable[[Message], "dict[str, Any] | None"]


class ScriptedBroker:
    """A broker at ``path``. A test may end it with ``die`` and start it again, several times."""

    def __init__(self, path: Path, *, attach: str = "cell") -> None:
        self.path = path
        self.attach = attach
        self.epoch = 0
        self.state = "detached"
        self.device = DEVICE
        self.request: dict[str, Any] = {
            "memory": 4 * GiB,
            "limit": 4 * GiB,
            "devices": 1,
            "compute": 100,
            "priority": "notebook",
        }
        self.limits: dict[str, Any] = {"memory": 16 * GiB}
        self.env: dict[str, str] = {}
        #: Whether the provisioner must send ``retire`` before it kills a kernel.
        self.retire = False
        self.sessions: dict[str, dict[str, Any]] = {}
        self._opened = 0
        self.scripts: dict[str, Script] = {}
        self.messages: list[Message] = []
        self.problems: list[str] = []
        self._pending: dict[str, tuple[asyncio.StreamWriter, int]] = {}
        self._changed = threading.Condition()
        self._agents: list[asyncio.StreamWriter] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    # ------------------------------------------------------------------ start and end

    def start(self) -> ScriptedBroker:
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(60)
        return self

    def _serve(self, ready: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._stop = asyncio.Event()
            server = await asyncio.start_unix_server(self._talk, str(self.path), limit=MAX_LINE)
            ready.set()
            await self._stop.wait()
            server.close()
            self.hang_up()
            await asyncio.sleep(0)

        asyncio.run(serve())

    def hang_up(self) -> None:
        """Cut all connections, as if the broker died and came back at once.

        A script may call this method.
        """
        for writer in list(self._writers):
            writer.transport.abort()

    def die(self) -> None:
        """End without an answer, as if killed: cut the connections, and remove the socket file."""
        if self._thread is None:
            return
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._thread = None
        self._agents.clear()
        self._pending.clear()
        self.path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ what tests do

    def push(self, kind: str, /, **fields: Any) -> None:
        """Push a message to the agent that connected last."""

        def send() -> None:
            self._agents[-1].write(encode({"type": kind, **fields}))

        self._run(send)

    def hold_back(self, kind: str = "hold") -> None:
        """From now on, answer messages of this kind only when :meth:`answer` is called."""
        self.scripts[kind] = lambda message: None

    def grant(self, hold: str) -> None:
        """Grant the slice to a hold that still waits for its answer."""
        self._run(lambda: self.answer(hold, self.lease()))

    def refuse(self, hold: str, error: GPUPoolError) -> None:
        def send() -> None:
            writer, request_id = self._pending.pop(hold)
            writer.write(encode(error_message(error, request_id)))

        self._run(send)

    def answer(self, key: str, fields: dict[str, Any]) -> None:
        writer, request_id = self._pending.pop(key)
        writer.write(encode({"type": "ok", "id": request_id, **fields}))

    def lease(self) -> dict[str, Any]:
        """Attach the session and return the fields that describe its slice."""
        if self.state not in ("active", "idle"):
            self.epoch += 1
        self.state = "active"
        return {"epoch": self.epoch, "slices": self.slices()}

    def slices(self) -> list[dict[str, Any]]:
        return [{"device": self.device, "bytes": self.request["memory"]}]

    def ask_back(self) -> Message:
        """Ask the agent to yield its slice; return the agent's answer."""
        before = len(self.seen("yielded"))
        self.push("yield", epoch=self.epoch)
        answer = self.wait_for("yielded", count=before + 1)
        if answer["yielded"]:
            self.state = "detached"
            self.push("lease", state="detached", epoch=self.epoch, slices=[], reason="", **_PINNED)
        return answer

    def seen(self, kind: str, /, **fields: Any) -> list[Message]:
        with self._changed:
            return [
                m
                for m in self.messages
                if m["type"] == kind and all(m.get(k) == v for k, v in fields.items())
            ]

    def wait_for(
        self, kind: str, /, *, count: int = 1, timeout: float = 60, **fields: Any
    ) -> Message:
        """Wait for the ``count``-th message of this kind with these fields; return it."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                found = self.seen(kind, **fields)
                if len(found) >= count:
                    return found[count - 1]
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    got = [m["type"] for m in self.messages]
                    raise AssertionError(f"no {kind} {fields} (number {count}); got {got}")

    def live_holds(self) -> set[str]:
        """Return the holds that the agent has taken and not yet dropped or cancelled."""
        live: set[str] = set()
        with self._changed:
            for message in self.messages:
                if message["type"] == "hold":
                    live.add(message["hold"])
                elif message["type"] in ("drop", "cancel"):
                    live.discard(message["hold"])
        return live

    # ------------------------------------------------------------------ the wire

    def _run(self, function: Callable[[], None]) -> None:
        done: list[BaseException | None] = []
        finished = threading.Event()

        def run() -> None:
            try:
                function()
                done.append(None)
            except BaseException as error:
                done.append(error)
            finished.set()

        assert self._loop is not None
        self._loop.call_soon_threadsafe(run)
        assert finished.wait(60)
        if done[0] is not None:
            raise done[0]

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                try:
                    message = check_request(decode(line))
                except ProtocolError as error:
                    self.problems.append(str(error))
                    writer.write(encode(error_message(error, None)))
                    continue
                self._take(message, writer)
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            if writer in self._agents:
                self._agents.remove(writer)
            writer.close()

    def _take(self, message: Message, writer: asyncio.StreamWriter) -> None:
        kind, request_id = message["type"], message.get("id")
        if kind == "hello":
            self._agents.append(writer)
        script = self.scripts.get(kind) or getattr(self, f"_on_{kind}")
        if request_id is not None and message.get("hold") and kind == "hold":
            self._pending[message["hold"]] = (writer, request_id)
        answer = None
        try:
            fields = script(message)
        except GPUPoolError as error:
            if request_id is not None:
                answer = error_message(error, request_id)
        else:
            if request_id is not None and fields is not None:
                self._pending.pop(message.get("hold", ""), None)
                answer = {"type": "ok", "id": request_id, **fields}
        # Record the message before the answer is sent. A test may read ``messages`` as soon as the
        # agent has the answer.
        with self._changed:
            self.messages.append(message)
            self._changed.notify_all()
        if answer is not None:
            writer.write(encode(answer))

    # ------------------------------------------------------------------ without a script

    def _on_open(self, message: Message) -> dict[str, Any]:
        self._opened += 1
        session = f"s{self._opened}"
        self.sessions[session] = dict(message)
        env = {
            "GPUPOOL_SOCKET": str(self.path),
            "GPUPOOL_SESSION": session,
            "GPUPOOL_TOKEN": "secret-" + session,
            "GPUPOOL_ATTACH": message.get("attach") or self.attach,
            "CUDA_VISIBLE_DEVICES": self.device,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TF_FORCE_GPU_ALLOW_GROWTH": "true",
            **self.env,
        }
        return {
            "session": session,
            "token": env["GPUPOOL_TOKEN"],
            "attach": env["GPUPOOL_ATTACH"],
            "request": {**self.request, **message.get("request", {})},
            "env": env,
            "retire": self.retire,
        }

    def _on_launched(self, message: Message) -> dict[str, Any]:
        self.sessions[message["session"]]["pid"] = message["pid"]
        return {}

    def _on_close(self, message: Message) -> dict[str, Any]:
        self.sessions.pop(message["session"], None)
        return {}

    def _on_hello(self, message: Message) -> dict[str, Any]:
        return {
            "session": message["session"],
            "state": self.state,
            "epoch": self.epoch,
            "slices": self.slices() if self.state in ("active", "idle") else [],
            "attach": self.attach,
            "request": self.request,
            "limits": self.limits,
        }

    def _on_hold(self, message: Message) -> dict[str, Any]:
        return self.lease()

    def _on_drop(self, message: Message) -> None:
        return None

    def _on_cancel(self, message: Message) -> dict[str, Any]:
        pending = self._pending.pop(message["hold"], None)
        if pending is not None:
            error = RefusedError("The wait was cancelled.", code="cancelled")
            pending[0].write(encode(error_message(error, pending[1])))
        return {}

    def _on_yielded(self, message: Message) -> None:
        return None

    def _on_resting(self, message: Message) -> None:
        return None

    def _on_request(self, message: Message) -> dict[str, Any]:
        for name in ("memory", "limit", "devices", "compute", "priority"):
            if message.get(name) is not None:
                self.request[name] = message[name]
        return {"request": self.request, "note": ""}

    def _on_release(self, message: Message) -> dict[str, Any]:
        return {"note": "The slice goes back to the pool now."}

    def _on_why(self, message: Message) -> dict[str, Any]:
        return {"lines": [], "standing": [], "starts_with_bytes": None, "holders": []}

    def _on_keep(self, message: Message) -> dict[str, Any]:
        return {"note": ""}

    def _on_status(self, message: Message) -> dict[str, Any]:
        attached = self.state in ("active", "idle")
        device = {
            "uuid": self.device,
            "index": 0,
            "name": "Scripted GPU",
            "emulated": True,
            "can_suspend": True,
            "memory_total": 16 * GiB,
            "memory_capacity": 15 * GiB,
            "memory_granted": self.request["memory"] if attached else 0,
            "memory_free": 11 * GiB,
            "drained_reason": "",
        }
        sessions = [
            {
                "id": name,
                "pid": session.get("pid"),
                "owner": "me",
                "label": session.get("label", ""),
                "state": self.state,
                "attach": self.attach,
                "granted_bytes": self.request["memory"] if attached else 0,
                "footprint_bytes": 0,
                "suspended_bytes": 0,
                "request": self.request,
                "holds": [],
                "device": self.device if attached else None,
                "devices": [self.device] if attached else [],
                "queue_position": None,
                "queue_length": 0,
                "expected": None,
                "wait_reason": "",
                "pinned_reason": "",
                "idle_since": time.time() - 3 if self.state == "idle" else None,
                "leaves_at": time.time() + 297,
                "wanted": False,
            }
            for name, session in self.sessions.items()
        ]
        return {
            "version": "0",
            "socket": str(self.path),
            "pid": os.getpid(),
            "now": time.time(),
            "emulated": True,
            "machine": "scripted",
            "devices": [device],
            "sessions": sessions,
            "queue_length": 0,
            "host": {},
            "settings": {"idle_timeout": 300.0},
        }

    def _on_journal(self, message: Message) -> dict[str, Any]:
        return {"rows": []}

    def _on_watch(self, message: Message) -> dict[str, Any]:
        return {"seq": 0}

    def _on_ping(self, message: Message) -> dict[str, Any]:
        return {}


_PINNED = {"pinned_reason": ""}
