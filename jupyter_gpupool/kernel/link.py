# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The kernel's side of its session: its identity, its holds, and the connection to the broker.

The agent *owns* its lease from the grant until it answers yes to a ``yield``. So a cell of an
attached session runs at once, and does not wait for an answer of the broker. The broker may even
die and restart while cells run: the agent sends its list of holds in the next ``hello``.

Several threads use this module. Cells call it from the main thread and from subshell threads. The
client's reader thread receives the broker's pushes. A daemon thread connects to the broker. One
lock protects all shared data. No thread holds the lock while it waits for an answer.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence

from ..client import CALL_TIMEOUT, Client, first_answer
from ..errors import BrokerUnavailable, Code, GPUPoolError
from ..protocol import Message
from ..states import ATTACHED
from ..threads import start_thread
from .holds import CallRefusal, HoldWait, LateReports, QueuePlace, Slice, slices_of
from .revive import Reviver

#: The first and the longest pause between two attempts to reach the broker, in seconds.
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0

#: The longest pause between two attempts to connect while a broker starts, in seconds. A thread
#: that waits for the broker's answer to the ``hello`` also checks the state this often.
LOOK = 0.2

#: If a broker dies before it answers a request, the agent sends the request to the next broker. It
#: stops this many seconds after the first try.
REPEAT = 90.0

log = logging.getLogger("jupyter_gpupool.kernel")


class SessionLink:
    """The session of this kernel process.

    Parameters
    ----------
    path, session, token:
        The provisioner's values from the environment.
    attach:
        The attach policy (``cell``, ``manual`` or ``lazy``) that applies until the broker sends
        one.
    cuda:
        Returns whether this process has called cuInit (None: unknown).
    cuda_blocks:
        Whether ``cuda`` makes a driver call, which would block in a suspended process. If True,
        this class calls ``cuda`` only while the session is attached.
    on_lost:
        Called in the reader thread if the driver has lost this session's device state.
    environ:
        The kernel's environment, with the command that restarts a dead broker.
    member:
        True if this process is not the kernel, but another program of the session, or the program
        that started the session. The broker sends no ``yield`` to a member. So a member calls
        :meth:`wait` for each hold, and never :meth:`take`.
    """

    def __init__(
        self,
        path: str | Path,
        session: str,
        token: str,
        *,
        attach: str = "cell",
        cuda: Callable[[], bool | None] = lambda: None,
        cuda_blocks: bool = True,
        on_lost: Callable[[str], None] = lambda _: None,
        on_notice: Callable[[str], None] = lambda _: None,
        on_news: Callable[[], None] = lambda: None,
        environ: Mapping[str, str] | None = None,
        member: bool = False,
    ) -> None:
        self.path = Path(path)
        self.reviver = Reviver(self.path, environ or {})
        self.session = session
        self.policy = attach
        self._token = token
        self._role = {"member": True} if member else {}
        self._cuda = cuda
        self._cuda_blocks = cuda_blocks
        self._on_lost = on_lost
        self._on_notice = on_notice
        self._on_news = on_news
        # A kernel has not used CUDA when its agent starts. A member may start later, so it must
        # check whether its process has already used CUDA.
        self._cuda_seen: bool | None = cuda() if member else False
        self._lock = threading.RLock()
        self._client: Client | None = None
        #: The number of the latest attempt to connect. The agent ignores a report that the
        #: connection of an earlier attempt has ended.
        self._attempt = 0
        self._greeted = False
        self._ready = threading.Event()
        self._stopped = False
        self._poke = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._holds: dict[str, str] = {}
        self._reports = LateReports(self._lock, self._tell_hold, self._tell_over)
        self._waits: dict[str, HoldWait] = {}
        self._owed: dict[str, Any] | None = None
        #: A key for each running cell or widget callback. ``_wanted`` says whether another kernel
        #: waits for the slice.
        self._requests: set[object] = set()
        self._wanted = False
        self._down_since: float | None = time.monotonic()
        #: When this agent sent its ``hello``; None if the broker has answered it, or if the agent
        #: has no connection.
        self._greeting_since: float | None = None
        self._failures = 0
        #: Why the agent has no connection. This is None while the agent has a connection, and
        #: during its first attempt to connect.
        self.down: GPUPoolError | None = None
        self.state = "detached"
        self.attached = False
        #: Whether this session gave up a slice after it used CUDA. If so, its device state may be
        #: in host memory, and CUDA calls block until the session is attached again.
        self.suspended = False
        self.epoch = 0
        self.slices: tuple[Slice, ...] = ()
        self.request: dict[str, Any] = {}
        self.limits: dict[str, Any] = {}
        #: Each device from the latest status, by UUID. It is kept because texts need the devices'
        #: names even without a broker.
        self.devices: dict[str, Mapping[str, Any]] = {}
        #: The time (``time.time()``) until which the user keeps the slice; 0.0 without a ``keep``.
        self.kept_until = 0.0
        self.queue: QueuePlace | None = None
        self.reason = ""
        self.pinned_reason = ""
        #: ``preempted`` says why the pool took this session's slice. It is "" if the pool did not
        #: take the slice, and again when the session has a new slice. ``remedy`` is a sentence of
        #: advice. ``preempted_at`` is the time of the preemption (``time.monotonic()``).
        self.preempted = self.remedy = ""
        self.preempted_at = 0.0
        #: The pool's last refusal of a CUDA call of this session, and the number of refusals.
        self.refused: CallRefusal | None = None
        self.refusals = 0

    # ------------------------------------------------------------------ start and end

    def start(self) -> None:
        """Begin to connect.

        A daemon thread connects, so that the kernel's start does not wait for the connection.
        """
        self._thread = threading.Thread(target=self._run, name="gpupool-link", daemon=True)
        start_thread(self._thread)

    def close(self) -> None:
        """End the connection and do not connect again.

        The broker frees the slice when the process ends.
        """
        with self._lock:
            self._stopped = True
            self._reports.close()
            client, self._client = self._client, None
        self._poke.set()
        self._ended.set()  # the client will not call on_close after close()
        if client is not None:
            client.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CALL_TIMEOUT)

    def unreachable_for(self) -> float:
        """Return for how many seconds there has been no broker; 0.0 if there is one."""
        since = self._greeting_since or self._down_since
        return 0.0 if since is None else time.monotonic() - since

    def given_up(self, wait: HoldWait) -> bool:
        """Return whether ``wait`` must end without a slice.

        It must end if there has been no broker for too long, and an attempt to connect has failed
        since the wait began.
        """
        return self.unreachable_for() > self.reviver.patience and self._failures > wait.failures

    def expected_back(self, give_up: float) -> bool:
        """Return whether the agent should repeat a request whose connection has ended.

        The agent does not repeat a request after ``give_up`` (``time.monotonic()``), or if the
        broker has been away for ``patience`` seconds.
        """
        return time.monotonic() < give_up and self.unreachable_for() < self.reviver.patience

    def wait_ready(self) -> None:
        """Wait until a broker answers the ``hello``.

        Stop if no broker has answered for ``patience`` seconds.
        """
        if not self._greeted:
            self._poke.set()
        while not self._greeted:
            left = self.reviver.patience - self.unreachable_for()
            if left <= 0 or self._ready.wait(min(left, LOOK)):
                break

    def unavailable(self) -> GPUPoolError:
        """Return the error that says why the broker cannot be used now."""
        # A start may have failed since the last attempt to connect. The guard then already refuses
        # calls, so look for this reason first.
        return (
            self.reviver.failed_start()
            or self.down
            or BrokerUnavailable(
                f"The GPU pool broker at {self.path} has not answered yet.",
                code=Code.BROKER_SILENT,
                next_step="Try again in a moment, or see `jupyter gpupool doctor`.",
            )
        )

    # ------------------------------------------------------------------ holds

    @property
    def holds(self) -> tuple[str, ...]:
        """The ids of the holds on the lease."""
        with self._lock:
            return tuple(self._holds)

    def take(self, hold: str, kind: str) -> bool:
        """Take a hold and return True; return False if the session is not attached.

        After False, the caller has no hold. To get one, it must wait for a slice (:meth:`wait`).
        This method does not wait for the broker: if the hold lasts, the agent soon reports it, and
        the report gets no answer.
        """
        with self._lock:
            if not self.attached:
                return False
            self._holds[hold] = kind
            self._reports.begin(hold, kind)
            return True

    def wait(self, hold: str, kind: str, on_change: Callable[[], None]) -> HoldWait:
        """Ask for the slice; return an object that shows the state of this wait.

        The caller watches the object, and ends the wait with :meth:`drop`.
        """
        wait = HoldWait(hold, kind, on_change)
        with self._lock:
            wait.failures = self._failures
            self._waits[hold] = wait
            self._ask(wait)
            if not self._greeted:
                self._poke.set()  # a cell waits, so end the pause and try to connect now
        return wait

    def drop(self, hold: str) -> None:
        """End a hold, or its wait. An unknown hold is ignored, so a second call is safe."""
        with self._lock:
            wait = self._waits.pop(hold, None)
            if self._holds.pop(hold, None) is not None:
                if not self._reports.end(hold):
                    self._tell_drop(hold)
            elif wait is not None:
                self._tell("cancel", hold=hold)
            if not self._waits:
                self.queue = None

    # ------------------------------------------------------------------ calls

    def start_call(self, kind: str, /, **fields: Any) -> Future[Message]:
        """Send a request about this session; see :meth:`jupyter_gpupool.client.Client.start`.

        Raises
        ------
        GPUPoolError
            If there is no broker.
        """
        with self._lock:
            client = self._client if self._greeted else None
            # Report the holds before the request, because their cells began before the request.
            self._reports.send()
        if client is None:
            self._poke.set()
            raise self.unavailable()
        return client.start(kind, **fields)

    def call(self, kind: str, /, *, timeout: float = CALL_TIMEOUT, **fields: Any) -> Message:
        """Send a request about this session and return the answer.

        If the broker has not answered the agent's ``hello``, this method first waits for that
        answer. If the broker dies before it answers the request, this method sends the request to
        the next broker. So ``kind`` must be a request that a broker may carry out twice.

        Raises
        ------
        GPUPoolError
            The broker's refusal, or :class:`BrokerUnavailable`.
        """
        give_up = time.monotonic() + REPEAT
        while True:
            self.wait_ready()
            try:
                answer = self.start_call(kind, **fields).result(timeout)
                break
            except FutureTimeout:
                raise BrokerUnavailable(
                    f"The GPU pool broker at {self.path} did not answer {kind!r} in {timeout:g} s.",
                    code=Code.BROKER_SILENT,
                    next_step="See `jupyter gpupool doctor`.",
                ) from None
            except BrokerUnavailable:
                if not self.expected_back(give_up):
                    raise
                # The reader thread may not know yet that the connection has ended.
                time.sleep(FIRST_PAUSE)
        self.note_request(answer)
        if isinstance(answer.get("devices"), list):
            self.devices.update((str(d.get("uuid")), d) for d in answer["devices"])
        if kind == "keep":
            self.kept_until = time.time() + float(fields["seconds"])
        elif kind == "release":
            self.kept_until = 0.0
        return answer

    def note_request(self, answer: Mapping[str, Any]) -> None:
        """Store the session's request from an answer of the broker, if the answer contains it."""
        if isinstance(answer.get("request"), dict):
            with self._lock:
                self.request = dict(answer["request"])

    def owe_request(self, fields: Mapping[str, Any]) -> None:
        """Store a change of the session's request; the agent sends it after the next ``hello``."""
        with self._lock:
            self._owed = dict(fields)

    # ------------------------------------------------------------------ the connection

    def _run(self) -> None:
        pause = FIRST_PAUSE
        while not self._stopped:
            self._poke.clear()
            with self._lock:
                self._attempt += 1
                self._ended.clear()
            try:
                self._connect(self._attempt)
            except Exception as error:
                if not isinstance(error, GPUPoolError):
                    # A bug in the agent must not leave this kernel without a broker.
                    log.exception("The connection to the GPU pool broker failed; trying again")
                    error = BrokerUnavailable(f"The connection to the broker failed: {error!r}.")
                    self._hang_up()
                if error.code != Code.BROKER_SILENT:
                    error = self.reviver.away(error)
                self._went_down(error, self._attempt)
                self._poke.wait(pause)
                longest = LOOK if self.reviver.expected else LONGEST_PAUSE
                pause = min(2 * pause, longest)
            else:
                pause = FIRST_PAUSE
                self._ended.wait()

    def _hang_up(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self, attempt: int) -> None:
        client = Client(
            self.path, on_push=self._push, on_close=lambda error: self._went_down(error, attempt)
        )
        with self._lock:
            hello: Future[Message] | None = None
            if not self._stopped:
                hello = client.start(
                    "hello",
                    session=self.session,
                    token=self._token,
                    epoch=self.epoch,
                    holds=[{"id": hold, "kind": kind} for hold, kind in self._holds.items()],
                    cuda=self._cuda_seen,
                    **self._role,
                )
                # Other threads can send messages when ``_client`` is set. So set it only after the
                # hello, because the hello must be the first message.
                self._client = client
                self._reports.forget()
                self._greeting_since = time.monotonic()
        if hello is None:
            client.close()
            self._ended.set()
            return
        try:
            # Wait as long as a broker may need to start. If the agent connected again earlier, the
            # old connection would stay as a dead one in the queue of the machine's socket.
            patience = first_answer(self.path)
            answer = hello.result(patience)
        except (GPUPoolError, FutureTimeout, CancelledError) as error:
            with self._lock:
                self._client = None
            client.close()
            if isinstance(error, GPUPoolError):
                raise
            raise BrokerUnavailable(
                f"The GPU pool broker at {self.path} did not answer this kernel's first message in "
                f"{patience:g} s.",
                code=Code.BROKER_SILENT,
                next_step="CPU work goes on; see `jupyter gpupool doctor`.",
            ) from None
        self._welcome(answer)

    def _welcome(self, answer: Message) -> None:
        with self._lock:
            if self._client is None or self._client.closed:
                return
            self._greeted = True
            self._ready.set()
            self._down_since = self._greeting_since = None
            self.down = None
            self.policy = answer.get("attach") or self.policy
            self.limits = dict(answer.get("limits") or {})
            self.reviver.came_back()
            if self._owed is None:
                self.note_request(answer)
            else:
                with suppress(BrokerUnavailable):  # sent again with the next hello
                    future = self._client.start("request", **self._owed)
                    future.add_done_callback(partial(self._owed_answered, self._owed))
            self._take_state(answer)
            # Iterate over a copy, because an answer may arrive in this loop and change the dict.
            for wait in list(self._waits.values()):
                self._ask(wait)
            if not self.attached:
                # The new broker has taken the slice while the agent had no connection. So the
                # running cells need a slice again.
                for hold, kind in list(self._holds.items()):
                    self._ask(HoldWait(hold, kind, lambda: None))
        self._changed()

    def _owed_answered(self, owed: Mapping[str, Any], future: Future[Message]) -> None:
        answer: Message = {}
        try:
            answer = future.result()
        except (BrokerUnavailable, CancelledError):
            return  # the agent sends the request again after the next hello
        except GPUPoolError as error:
            log.warning("The request of this kernel could not be restored: %s", error)
        with self._lock:
            if self._owed is owed:
                self._owed = None
        self.note_request(answer)

    def _went_down(self, error: GPUPoolError, attempt: int) -> None:
        with self._lock:
            if attempt != self._attempt:
                return  # the reader thread of an earlier connection made this call too late
            self._ended.set()
            self._client = None
            self._greeted = False
            self._ready.clear()
            self._greeting_since = None
            self._failures += 1
            self.queue = None
            if self._down_since is None:
                self._down_since = time.monotonic()
            self.down = error
            waits = list(self._waits.values())
            for wait in waits:
                wait.asked = False
        self._changed()

    def _tell(self, kind: str, /, **fields: Any) -> None:
        """Send a message that gets no answer.

        The caller holds the lock, so that the messages arrive in the right order.
        """
        if self._client is not None:
            try:
                self._client.send(kind, **fields)
            except BrokerUnavailable:
                pass  # nothing is lost: the next hello lists the holds

    def _tell_hold(self, hold: str, kind: str) -> None:
        self._tell("hold", hold=hold, kind=kind, epoch=self.epoch, wait=False)

    def _tell_over(self, hold: str, kind: str) -> None:
        if self.attached:  # if the session is detached, this report would ask for a slice
            self._tell_hold(hold, kind)
            self._tell_drop(hold)

    def _tell_drop(self, hold: str) -> None:
        self._tell("drop", hold=hold, cuda=self._probe())

    def _ask(self, wait: HoldWait) -> None:
        if self._client is None or not self._greeted or wait.asked:
            return
        try:
            future = self._client.start(
                "hold", hold=wait.hold, kind=wait.kind, epoch=self.epoch, wait=True
            )
        except BrokerUnavailable:
            return  # the agent asks again after the next hello
        wait.asked = True
        future.add_done_callback(partial(self._answered, wait))

    def _answered(self, wait: HoldWait, future: Future[Message]) -> None:
        try:
            answer: Message | GPUPoolError = future.result()
        except (BrokerUnavailable, CancelledError):
            return  # the agent asks again after the next hello
        except GPUPoolError as error:
            answer = error
        with self._lock:
            if not isinstance(answer, GPUPoolError):
                self._take_lease(int(answer["epoch"]), slices_of(answer))
            wanted = self._waits.pop(wait.hold, None) is wait
            if wanted and not isinstance(answer, GPUPoolError):
                self._holds[wait.hold] = wait.kind
            elif wait.hold not in self._holds and not isinstance(answer, GPUPoolError):
                self._tell_drop(wait.hold)
            if not self._waits:
                self.queue = None
            wait.answer = answer
        wait.on_change()

    # ------------------------------------------------------------------ running requests

    def begin_request(self) -> object:
        """Note that a cell or widget callback begins; return the key for :meth:`end_request`."""
        key = object()
        with self._lock:
            self._requests.add(key)
        return key

    def end_request(self, key: object) -> None:
        """Note the end of a cell or widget callback.

        If no other cell or callback runs and another kernel waits for the slice, send ``resting``
        to the broker.
        """
        with self._lock:
            self._requests.discard(key)
            self._rest()

    def _rest(self) -> None:
        if self._wanted and not self._requests:
            self._tell("resting")

    # ------------------------------------------------------------------ pushes (reader thread)

    def _push(self, message: Message) -> None:
        try:
            self._take_push(message)
        except (KeyError, TypeError, ValueError) as error:
            # A malformed message must not end the reader thread, because everything else depends on
            # that thread.
            log.warning("A %r message of the broker was not understood: %r", message, error)

    def _take_push(self, message: Message) -> None:
        kind = message["type"]
        if kind == "yield":
            self._yield(int(message["epoch"]))
        elif kind == "lease":
            with self._lock:
                self._take_state(message)
            self._changed()
        elif kind == "queue":
            with self._lock:
                now, left = time.monotonic(), message.get("left")
                self.queue = QueuePlace(
                    int(message.get("position") or 0),
                    int(message.get("length") or 0),
                    str(message.get("reason") or ""),
                    now - float(message.get("waited") or 0.0),
                    None if left is None else (now + float(left[0]), now + float(left[1])),
                )
            self._changed()
        elif kind == "refused":
            with self._lock:
                names = ("what", "code", "message", "next_step")
                self.refused = CallRefusal(*(str(message.get(name) or "") for name in names))
                self.refusals += 1
            self._changed()
        elif kind == "wanted":
            with self._lock:
                self._wanted = True
                self._rest()
        elif kind == "lost":
            with self._lock:
                self.attached, self.slices, self.state = False, (), "ended"
            self._on_lost(str(message.get("message") or "The GPU state of this kernel is lost."))
            self._changed()
        elif kind == "notice":
            self._on_notice(str(message.get("message") or ""))

    def _changed(self) -> None:
        with self._lock:
            waits = list(self._waits.values())
        for wait in waits:
            wait.on_change()
        self._on_news()

    def _yield(self, epoch: int) -> None:
        """Give up the lease if nothing uses it, and tell the broker the decision.

        If the epoch is older than the agent's own, the broker asks for a lease that has ended. The
        agent then refuses. If the epoch is newer, the agent does not know the lease yet. The agent
        may give up this lease too, because a kernel without a hold does not use its slice.
        """
        with self._lock:
            if epoch >= self.epoch:
                self._reports.send()  # the broker must learn that these cells have ended
            given = epoch >= self.epoch and not self._holds and not self._waits
            cuda = self._probe()
            if given and self.attached:
                self.attached, self.slices, self.state = False, (), "detaching"
                self.suspended = cuda is not False
                self._wanted = False
            self._tell("yielded", epoch=epoch, yielded=given, cuda=cuda)

    def _probe(self) -> bool | None:
        """Return whether this process has called cuInit; make no driver call that may block."""
        if (self.attached or not self._cuda_blocks) and self._cuda_seen is not True:
            self._cuda_seen = self._cuda()
        return self._cuda_seen

    def _take_state(self, message: Message) -> None:
        epoch = int(message.get("epoch") or 0)
        if epoch < self.epoch:
            return  # the message is about a lease that has ended
        self.state = str(message.get("state") or self.state)
        self.reason = str(message.get("reason") or "")
        self.pinned_reason = str(message.get("pinned_reason") or "")
        if self.state != "queued" and not self._waits:
            self.queue = None  # a CUDA call has stopped waiting
        if message.get("preempted") and self.state == "queued" and not self.preempted:
            self.preempted, self.preempted_at = str(message["preempted"]), time.monotonic()
            self.remedy = str(message.get("remedy") or "")
        if self.state in ATTACHED:
            self._take_lease(epoch, slices_of(message))
        elif self.state != "detaching":  # in "detaching", ``_yield`` has already set these values
            if self.attached:
                seen = self._cuda_seen if self._cuda_blocks else self._probe()
                self.suspended = seen is not False
            self.epoch, self.attached, self.slices = epoch, False, ()
            self._wanted = False

    def _take_lease(self, epoch: int, slices: Sequence[Slice]) -> None:
        if epoch < self.epoch:
            return
        self.epoch, self.slices = epoch, tuple(slices)
        self.attached, self.suspended, self.preempted = True, False, ""
        if self.state not in ATTACHED:
            self.state = "active"
