# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The cell gate: the steps before and after the code of each execute request.

The gate replaces the method ``do_execute`` of the kernel object. ipykernel calls this method once
per execute request, in any thread. The gate uses no events of IPython. In ``pre_run_cell``, IPython
swallows a KeyboardInterrupt, so the cell would run although the user has interrupted its wait. A
widget message triggers ``post_execute`` in the middle of a running cell.

In ``lazy`` policy the guard in front of the driver makes the CUDA calls themselves wait. So the
gate takes no hold and sends no message, except for a cell that asks for a slice (``%%gpu``, tag
``gpu``). The gate shows that a call waits, and explains a refusal under the error.

In ``cell`` policy every cell first waits for the slice, and holds it while it runs:

- An ordinary cell holds the slice; it waits first if the session is detached.
- A cell with only ``%gpu`` lines, or with the tag ``no-gpu``, neither holds nor waits.
- Silent requests, empty cells and widget messages hold the slice if the session is attached. They
  wait only if the device state is in host memory, because a CUDA call would then block the kernel
  forever. Otherwise they neither hold nor wait.

In ``manual`` policy only a cell that asks for a slice (``%%gpu``, tag ``gpu``) waits.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import time
from concurrent.futures import Future
from typing import Any, Awaitable, Callable, Literal, Mapping

from ..errors import BrokerUnavailable, Code, GPUPoolError, RefusedError
from ..protocol import Message
from ..units import format_bytes
from .advice import explain, may_be_refused, no_broker
from .call_waits import CallWaits
from .command import (
    CellRequest,
    cell_header,
    current_header,
    hide_header,
    is_gpu_only,
    parse_cell_header,
)
from .frameworks import FrameworkCaps, show_devices
from .guard_state import Guard
from .holds import Slice
from .jax_backends import JaxBackends
from .link import REPEAT, SessionLink
from .waits import (
    HOW_TO_STOP_BESIDE,
    TICK,
    Alarm,
    Interrupts,
    WaitDisplay,
    describe,
    interrupted,
    stopped,
    worth_showing,
)

Admission = Literal["pass", "free", "soft", "if-attached", "wait"]

#: If a cell ends with the error of a refused call, the gate waits this many seconds for the
#: broker's reason.
WORD = 0.25

#: How many seconds to wait for the broker's answer to a request. A wait for a slice has no such
#: limit.
ANSWER = 10.0

log = logging.getLogger("jupyter_gpupool.kernel")


class CellGate:
    """Wraps one kernel's ``do_execute`` and its handling of widget messages."""

    def __init__(
        self,
        shell: Any,
        link: SessionLink,
        guard: Guard,
        caps: FrameworkCaps,
        interrupts: Interrupts,
    ) -> None:
        self.shell = shell
        self.kernel = shell.kernel
        self.link = link
        self.guard = guard
        self.calls = CallWaits(self.kernel, link, guard) if guard.on else None
        self.caps = caps
        self.jax = JaxBackends()
        self.interrupts = interrupts
        self.one_cell = RequestForOneCell(link, interrupts, self.notice)
        self._ids = itertools.count(1)
        self._notices: list[str] = []
        self._told_unreachable = False
        self._told_suspended = 0
        self._originals: dict[str, Any] = {}
        self._settled: tuple[Slice, ...] = ()

    # ------------------------------------------------------------------ install and uninstall

    def install(self) -> None:
        """Put the gate in front of the kernel."""
        kernel = self.kernel
        self._originals = {
            "do_execute": kernel.do_execute,
            "do_inspect": kernel.do_inspect,
            "do_complete": kernel.do_complete,
            "comm_msg": kernel.shell_handlers.get("comm_msg"),
        }
        kernel.do_execute = self.do_execute
        kernel.do_inspect = self.do_inspect
        kernel.do_complete = self.do_complete
        if self._originals["comm_msg"] is not None:
            kernel.shell_handlers["comm_msg"] = self.comm_msg
        self.shell.input_transformers_cleanup.insert(0, hide_header)
        if self.calls is not None:
            self.calls.install()

    def uninstall(self) -> None:
        """Remove the gate."""
        kernel = self.kernel
        for name in ("do_execute", "do_inspect", "do_complete"):
            setattr(kernel, name, self._originals[name])
        if self._originals["comm_msg"] is not None:
            kernel.shell_handlers["comm_msg"] = self._originals["comm_msg"]
        if hide_header in self.shell.input_transformers_cleanup:
            self.shell.input_transformers_cleanup.remove(hide_header)
        if self.calls is not None:
            self.calls.uninstall()

    def news(self) -> None:
        """Check whether calls wait, because the link has news; any thread may call this."""
        if self.calls is not None:
            self.calls.news()

    def notice(self, text: str) -> None:
        """Show ``text`` above the output of the next cell."""
        self._notices.append(text)

    def announce(self, text: str) -> None:
        """Show ``text`` at once, under the output of the latest request.

        Any thread may call this.
        """
        self.publisher()("stream", {"name": "stderr", "text": text + "\n"})

    # ------------------------------------------------------------------ requests

    async def do_execute(self, code: str, silent: bool, *args: Any, **kwargs: Any) -> Any:
        """Run an execute request by the rule of :meth:`plan`; ipykernel calls this method."""
        key = self.link.begin_request()
        try:
            return await self._execute(code, silent, *args, **kwargs)
        finally:
            self._over(key)

    async def _execute(self, code: str, silent: bool, *args: Any, **kwargs: Any) -> Any:
        header = cell_header(code)
        plan = self.plan(code, silent, kwargs.get("cell_meta"), header)
        if plan == "pass":
            return await _result(self._originals["do_execute"](code, silent, *args, **kwargs))
        if plan == "free":
            return await self._run(code, silent, args, kwargs)
        hold = f"cell-{next(self._ids)}"
        before: dict[str, Any] = {}
        try:
            problem: GPUPoolError | None = None
            try:
                if header:
                    await self.one_cell.broker_expected()
                    await self.one_cell.ask_for(
                        parse_cell_header(header, self.link.request), before
                    )
                if not self.link.take(hold, "cell") and self._must_wait(plan):
                    problem = await self._wait(hold, "cell", silent, explicit=bool(header))
                elif plan == "if-attached" and self.link.suspended:
                    self._tell_suspended()
            except KeyboardInterrupt:
                problem = interrupted()
            except BrokerUnavailable as error:
                problem = no_broker(self.link, error)
            except GPUPoolError as error:
                problem = error
            if problem is not None:
                return self._abort(problem, code, silent, args, kwargs)
            token = current_header.set(header)
            try:
                return await self._run(code, silent, args, kwargs)
            finally:
                current_header.reset(token)
        finally:
            self._drop(hold)
            if before:
                await self.one_cell.give_back(before)

    async def _run(
        self, code: str, silent: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the code of a request. The request has already waited, if a wait was necessary."""
        self._before_cell(silent)
        calls, refusals = self.calls, self.link.refusals
        self.jax.before()
        key = calls.begin(silent) if calls is not None else 0
        waits = False
        try:
            reply = await _result(self._originals["do_execute"](code, silent, *args, **kwargs))
        finally:
            if calls is not None:
                waits = calls.end(key)
        if not silent:
            await self._after_cell(reply, refusals, waits)
        return reply

    async def comm_msg(self, stream: Any, ident: Any, message: Any) -> Any:
        """Run a widget callback while holding the slice. ipykernel calls this for each comm_msg."""
        if self.lazy:
            key = self.link.begin_request()
            try:
                return await _result(self._originals["comm_msg"](stream, ident, message))
            finally:
                self._over(key)
        hold = f"comm-{next(self._ids)}"
        try:
            if not self.link.take(hold, "comm") and self._must_wait("soft"):
                problem = await self._wait(hold, "comm", True)
                if problem is not None:
                    log.warning("A widget message was dropped: %s", problem)
                    return None
            return await _result(self._originals["comm_msg"](stream, ident, message))
        finally:
            self._drop(hold)

    async def do_inspect(self, *args: Any, **kwargs: Any) -> Any:
        """Answer a tooltip; while the device state is in host memory, do not inspect any object.

        To inspect an object, IPython may compute its text; for a tensor this needs a copy from the
        device. While the device state is in host memory, this copy would block the kernel, or crash
        the kernel if the driver cannot wait. Even without these problems, the whole state would
        move back to the device only to show a tooltip.
        """
        if not self._away():
            return await _result(self._originals["do_inspect"](*args, **kwargs))
        text = (
            "The GPU state of this kernel is in host memory, so nothing can be inspected now. "
            "Run a cell (or %gpu attach) first."
        )
        return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}

    async def do_complete(self, *args: Any, **kwargs: Any) -> Any:
        """Complete code, but without Jedi while the device state is in host memory.

        Jedi, one of IPython's methods of completion, evaluates properties, which may copy a tensor
        from the device.
        """
        completer: Any = self.shell.Completer
        jedi = getattr(completer, "use_jedi", False) and self._away()
        if jedi:
            completer.use_jedi = False
        try:
            return await _result(self._originals["do_complete"](*args, **kwargs))
        finally:
            if jedi:
                completer.use_jedi = True

    def _away(self) -> bool:
        return self.guard.away() if self.guard.on else self.link.suspended

    def plan(
        self, code: str, silent: bool, meta: Mapping[str, Any] | None, header: str = ""
    ) -> Admission:
        """Return the rule for an execute request: whether it holds the slice or waits for it."""
        if header:
            return "wait"
        lazy = self.lazy
        if "%gpu" in code and is_gpu_only(code):
            return "pass"
        tags = (meta or {}).get("tags") or ()
        if "no-gpu" in tags or (meta or {}).get("no-gpu"):
            return "free" if lazy else "pass"
        if lazy:
            return "wait" if "gpu" in tags and code.strip() and not silent else "free"
        if silent or not code.strip():
            return "soft"
        if "gpu" in tags:
            return "wait"
        return "if-attached" if self.link.policy == "manual" else "wait"

    @property
    def lazy(self) -> bool:
        """Whether CUDA calls wait in the guard. Most requests then need no wait."""
        return self.link.policy == "lazy" and self.guard.on

    def _must_wait(self, plan: Admission) -> bool:
        if plan == "soft":
            return self.link.suspended and self.link.policy != "manual"
        return plan == "wait"

    # ------------------------------------------------------------------ the wait

    async def _wait(
        self, hold: str, kind: str, silent: bool, *, explicit: bool = False
    ) -> GPUPoolError | None:
        """Wait for the hold; return None if the cell may run, else an error with the reason."""
        alarm = Alarm()
        display = WaitDisplay(self.publisher(), f"gpupool-{hold}", self.link)
        with self.interrupts.watch(alarm.interrupt):
            wait = self.link.wait(hold, kind, alarm.ring)
            try:
                while not alarm.interrupted:
                    if isinstance(wait.answer, GPUPoolError):
                        return wait.answer
                    if wait.answer is not None:
                        self._told_unreachable = False
                        return None
                    if self.link.given_up(wait):
                        return self._without_broker(explicit)
                    heard = self.interrupts.heard()
                    if not silent and worth_showing(self.link, wait, patient=not heard):
                        display.show(describe(self.link), "" if heard else HOW_TO_STOP_BESIDE)
                    await alarm.wait()
                return interrupted()
            finally:
                if wait.answer is None or alarm.interrupted:
                    self._drop(hold)
                display.clear()

    def _without_broker(self, explicit: bool) -> GPUPoolError | None:
        """Return None if a cell may run without a broker, else an error with the reason."""
        error = no_broker(self.link, self.link.unavailable())
        if self.link.suspended or explicit:
            why = (
                "The GPU state of this kernel is in host memory and cannot be brought back. "
                if self.link.suspended
                else ""
            )
            return BrokerUnavailable(
                f"{why}{error.message}",
                code=error.code,
                next_step=error.next_step,
            )
        if not self._told_unreachable:
            self._told_unreachable = True
            self.notice(
                f"GPU pool: {error.message} Until the broker is back, cells run without a GPU "
                f"slice and must not use the GPU. {error.next_step}".rstrip()
            )
        return None

    def _tell_suspended(self) -> None:
        """In ``manual`` policy, tell the user once per release that a CUDA call fails or waits."""
        if self._told_suspended != self.link.epoch:
            self._told_suspended = self.link.epoch
            then = "fails" if self.guard.on else "waits, and cannot be interrupted"
            self.notice(
                "GPU pool: the GPU state of this kernel is in host memory. Type %gpu attach before "
                f"you use the GPU: until then a CUDA call {then}."
            )

    # ------------------------------------------------------------------ around the cell

    def _drop(self, hold: str) -> None:
        while True:
            try:
                return self.link.drop(hold)
            except KeyboardInterrupt:
                continue  # try again: otherwise the hold of an ended cell keeps the slice

    def _over(self, key: object) -> None:
        while True:
            try:
                return self.link.end_request(key)
            except KeyboardInterrupt:
                continue  # try again: otherwise the kernel looks busy

    def settle(self) -> None:
        """Set the visible devices and the framework caps for the session's present lease."""
        slices = self.link.slices
        if slices != self._settled and slices:
            self._settled = slices  # once per lease: the user may shorten the list later
            show_devices([s.device for s in slices])
        if not self.guard.on:  # with the guard, frameworks already see the slice's size
            self.caps.apply(slices)

    def request_changed(self) -> None:
        """Set the visible devices after a change of the request, also without a slice."""
        self.settle()
        if not self.link.slices:
            show_devices(self.guard.devices())

    def _before_cell(self, silent: bool) -> None:
        self.settle()
        if not silent and self._notices:
            notices, self._notices = self._notices, []
            self.publisher()("stream", {"name": "stderr", "text": "\n".join(notices) + "\n"})

    async def _after_cell(self, reply: Any, refusals: int, waits: bool) -> None:
        """Show a line under the cell if the pool caused its error.

        ``waits``: a CUDA call of the cell waited for a slice, and the kernel had none when the cell
        ended.
        """
        failed = isinstance(reply, dict) and reply.get("status") == "error"
        if not self.guard.on:
            self.caps.apply(self.link.slices)  # the cell may have imported torch
        elif line := self.jax.after(failed, waits):
            self.publisher()("stream", {"name": "stderr", "text": line + "\n"})
        if not failed:
            return
        name, text = str(reply.get("ename", "")), str(reply.get("evalue", ""))
        if self.guard.on and may_be_refused(name, text):
            await self._word(refusals)
        refused = self.link.refused if self.link.refusals != refusals else None
        line = explain(self.link, self.guard, refused, name, text)
        if waits and name == "KeyboardInterrupt" and refused is None:
            line = stopped(self.link)
        if line:
            self.publisher()("stream", {"name": "stderr", "text": line + "\n"})

    async def _word(self, refusals: int) -> None:
        """Wait until the broker says why it refused a CUDA call, but at most WORD seconds."""
        alarm = Alarm()
        deadline = time.monotonic() + WORD
        with self.interrupts.watch(alarm.ring):  # an interrupt must not reach the event loop
            while self.link.refusals == refusals and time.monotonic() < deadline:
                await alarm.wait(WORD / 10)

    def publisher(self) -> Callable[[str, dict[str, Any]], None]:
        """Return a function that publishes outputs of the present request.

        The function remembers this request, because the kernel may handle other messages while the
        request waits. The function does not use ``display_pub``, because ``%%capture`` and the
        history must not contain these outputs.
        """
        kernel = self.kernel
        parent = kernel.get_parent()

        def publish(kind: str, content: dict[str, Any]) -> None:
            kernel.session.send(kernel.iopub_socket, kind, content, parent=parent)

        return publish

    def _abort(
        self,
        problem: GPUPoolError,
        code: str,
        silent: bool,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Answer an execute request with an error, without running its code.

        After this answer ipykernel aborts the queued requests, too.
        """
        name = type(problem).__name__
        if name == "RefusedError":
            name = "GPURefused"
        text = str(problem)
        content = {
            "ename": name,
            "evalue": text,
            "traceback": [f"\x1b[0;31m{name}\x1b[0m: {text}"],
        }
        if not silent:
            self.publisher()("error", content)
        count = self.shell.execution_count
        store = kwargs.get("store_history", args[0] if args else True)
        if store and not silent:
            self.shell.history_manager.store_inputs(count, code, code)
            self.shell.execution_count += 1
        return {
            "status": "error",
            "execution_count": count,
            "user_expressions": {},
            "payload": [],
            **content,
        }


class RequestForOneCell:
    """Changes the session's request for one cell, and restores the old request afterwards.

    ``notice`` shows a text to the user.
    """

    def __init__(
        self, link: SessionLink, interrupts: Interrupts, notice: Callable[[str], None]
    ) -> None:
        self._link = link
        self._interrupts = interrupts
        self._notice = notice

    async def ask_for(self, asked: CellRequest, before: dict[str, Any]) -> None:
        """Change the request for one cell; put the old values of its fields into ``before``."""
        old = {name: self._link.request.get(name) for name in asked.fields}
        # Store the old values before the broker answers, because the broker may change the request
        # and then die.
        before.update({name: value for name, value in old.items() if value is not None})
        try:
            answer = await self._call("request", asked.fields)
        except RefusedError:
            before.clear()
            raise
        self._link.note_request(answer)
        smallest = min((s.bytes for s in self._link.slices), default=0)
        if self._link.attached and not self._link.holds and smallest < asked.memory:
            # The slice is still too small, because the kernel's GPU has too little free memory.
            # Release the slice, so that the cell waits for a slice of the new size.
            await self._call("release", {})
            await self._until_detached(asked.memory)

    async def _until_detached(self, wanted: int) -> None:
        """Wait until the broker has taken the released slice."""
        alarm = Alarm()
        give_up = time.monotonic() + ANSWER
        with self._interrupts.watch(alarm.interrupt):
            while self._link.attached and not alarm.interrupted and time.monotonic() < give_up:
                await alarm.wait()
        if alarm.interrupted:
            raise interrupted()
        if self._link.attached:
            why = self._link.pinned_reason or self._link.reason or "the kernel is busy"
            raise RefusedError(
                f"{format_bytes(wanted)} is not free on the GPU of this kernel, and the kernel "
                f"could not move to another GPU: {why}.",
                next_step="Try again later, or ask for less.",
            )

    async def give_back(self, before: dict[str, Any]) -> None:
        try:
            answer = await self._call("request", before, repeat=False)
        except BrokerUnavailable:
            self._link.owe_request(before)
        except GPUPoolError as error:
            self._notice(f"GPU pool: the request of this kernel could not be restored: {error}")
        else:
            self._link.note_request(answer)

    async def broker_expected(self, at_least: float = 0.0) -> None:
        """Wait until a broker answers, or until none has answered for ``patience`` seconds.

        The wait takes at least ``at_least`` seconds. An interrupt by the user ends it.
        """
        alarm = Alarm()
        begun = time.monotonic()
        with self._interrupts.watch(alarm.interrupt):
            while (
                0.0 < self._link.unreachable_for() < self._link.reviver.patience
                or time.monotonic() < begun + at_least
            ):
                await alarm.wait()
                if alarm.interrupted:
                    raise interrupted()

    async def _call(
        self, kind: str, fields: Mapping[str, Any], *, repeat: bool = True
    ) -> Mapping[str, Any]:
        """Send a request that the broker answers at once, and return the answer.

        If the broker dies before it answers, and ``repeat`` is True, this method sends the request
        to the next broker.
        """
        give_up = time.monotonic() + REPEAT
        while True:
            try:
                future = self._link.start_call(kind, **fields)
                if await self._done(future):
                    return future.result()
            except BrokerUnavailable:
                if not (repeat and self._link.expected_back(give_up)):
                    raise
            else:
                raise BrokerUnavailable(
                    f"The GPU pool broker at {self._link.path} did not answer in {ANSWER:g} s.",
                    code=Code.BROKER_SILENT,
                    next_step="See `jupyter gpupool doctor`.",
                )
            await self.broker_expected(TICK)

    async def _done(self, future: Future[Message]) -> bool:
        """Wait for an answer; return whether it came within ANSWER seconds.

        This method catches an interrupt by the user and continues to wait. Without this, the
        interrupt would raise a KeyboardInterrupt in the event loop, and end the loop.
        """
        alarm = Alarm()
        with self._interrupts.watch(alarm.ring):
            future.add_done_callback(lambda _: alarm.ring())
            deadline = time.monotonic() + ANSWER
            while not future.done() and time.monotonic() < deadline:
                await alarm.wait()
        return future.done()


async def _result(value: Awaitable[Any] | Any) -> Any:
    return await value if inspect.isawaitable(value) else value
