# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""All public exceptions. Each has a stable ``code``, a message, the next step, and details.

This module imports only the standard library.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Mapping


class Code(str, Enum):
    """The codes of errors, refusals and log lines. A code is a word that programs can compare.

    ``status`` is the HTTP status of the REST API's answer, and ``about`` explains the code in a
    sentence. ``docs/errors.md`` is made from this class.
    """

    status: int
    about: str

    def __new__(cls, word: str, status: int, about: str) -> Code:
        code = str.__new__(cls, word)
        code._value_ = word
        code.status = status
        code.about = about
        return code

    __str__ = str.__str__

    @classmethod
    def of(cls, word: object, otherwise: Code) -> Code:
        """Return the code named ``word``; ``otherwise`` if this version does not know that name."""
        return next((code for code in cls if code.value == word), otherwise)

    # A request that the pool can never grant, in any state.
    BAD_REQUEST = "bad-request", 400, "A value in the request is not allowed."
    PROTOCOL = "protocol", 400, "A message does not follow the protocol."
    TOO_LONG = "too-long", 400, "A message is longer than the protocol allows."
    UNKNOWN_TYPE = "unknown-type", 502, "The broker knows no such message type."
    UNKNOWN_PRIORITY = "unknown-priority", 400, "There is no such priority class."
    UNKNOWN_SESSION = "unknown-session", 404, "No session of yours has this id, or it has ended."
    AMBIGUOUS_SESSION = "ambiguous-session", 409, "Several session ids begin with this text."
    UNKNOWN_DEVICE = "unknown-device", 409, "The pool has no such GPU."
    NOT_ALLOWED = "not-allowed", 403, "Only an administrator may do this."
    NOT_YOURS = "not-yours", 403, "The session or process belongs to another user or session."
    NOT_IN_GROUP = "not-in-group", 403, "The user is not in the group that the request names."
    BAD_TOKEN = "bad-token", 403, "The token does not belong to the session."
    BAD_CREDENTIAL = "bad-credential", 403, "A credential from another machine is not valid."
    OVER_KERNEL_LIMIT = (
        "over-kernel-limit", 409, "The request exceeds c.GPUPool.max_memory_per_kernel."
    )  # fmt: skip
    OVER_DEVICE = "over-device", 409, "The request exceeds what one GPU of the pool can give."
    UNDER_LEAST = "under-least", 409, "The request is for less memory than a CUDA context takes."
    OVER_QUOTA = "over-quota", 409, "The request exceeds your quota, or the cap of your group."
    OVER_HOST = "over-host", 409, "Host memory could not hold a suspended kernel of this size."
    TOO_MANY_DEVICES = "too-many-devices", 409, "The request is for more GPUs than the pool has."
    DEVICES_BOUND = "devices-bound", 409, "CUDA is in use already, so the GPUs cannot change."
    IN_USE = "in-use", 409, "The kernel uses more memory than the request allows."

    # A request that the pool cannot grant now.
    BUSY = "busy", 409, "The user sent too many requests; the details say how long to wait."
    AGAIN = "again", 409, "The request cannot be carried out now, but may succeed later."
    BUDGET = "budget", 409, "Your GPU-seconds of today, or those of your group, are used up."
    LIMIT = "limit", 409, "An allocation exceeds the limit that the kernel asked for."
    NO_MEMORY = "no-memory", 409, "An allocation found no free memory on the GPU or the host."
    QUOTA = "quota", 409, "An allocation found no memory left in your quota."
    MANUAL = "manual", 409, "A kernel with attach policy 'manual' used the GPU without a slice."
    WAIT_TIMEOUT = "wait-timeout", 409, "No slice became free within c.GPUPool.max_wait."
    CANCELLED = "cancelled", 409, "The wait was cancelled."
    INTERRUPTED = "interrupted", 409, "The user interrupted the wait."
    NOTHING_TO_RELEASE = "nothing-to-release", 409, "The kernel has no slice that it could release."
    NOTHING_TO_KEEP = "nothing-to-keep", 409, "The kernel has no slice that could be kept."
    OVER_KEEP = "over-keep", 409, "The requested time is longer than c.GPUPool.max_keep."
    CANNOT_SUSPEND = "cannot-suspend", 409, "The kernel's state cannot leave its GPU."
    NOT_MOVED = "not-moved", 409, "The process cannot be moved to the GPU of its slice."
    LOST = "lost", 409, "The GPU, or the kernel's state on it, was lost."
    PAUSED = "paused", 409, "An administrator paused or drained the GPU, or the whole pool."
    NOT_PAUSED = "not-paused", 409, "Nothing is paused or drained."
    NO_ROOM = "no-room", 409, "The GPU has no room for its self-test."
    NO_DEVICE = "no-device", 409, "The pool has no GPU that it can use."

    # A request that is impossible in the present state of the session, its page or its connection.
    SESSION_EXISTS = "session-exists", 409, "A session with this id exists already."
    ALREADY_LAUNCHED = "already-launched", 409, "The session has a process already."
    NOT_LAUNCHED = "not-launched", 409, "The broker does not know the session's process yet."
    NO_PROCESS = "no-process", 409, "There is no such process in the session."
    DUPLICATE = "duplicate", 409, "The same request is under way already."
    NO_PAGE = "no-page", 409, "The page that kernel and broker share cannot be made, or is lost."
    BAD_PAGE = "bad-page", 502, "The page that kernel and broker share is damaged."
    NO_GUARD = "no-guard", 409, "The guard is not compiled, or this broker does not use it."
    NOT_POOLED = "not-pooled", 409, "The kernel runs without a session of the pool."

    # The broker and the connection to it.
    BROKER_UNAVAILABLE = "broker-unavailable", 503, "No broker listens, or the connection ended."
    BROKER_SILENT = "broker-silent", 503, "The broker listens, but it does not answer."
    NO_BROKER = "no-broker", 503, "There is no broker at the socket."
    BAD_SOCKET = "bad-socket", 503, "The socket or its folder cannot be used, or is not safe."
    ALREADY_RUNNING = "already-running", 503, "Another broker runs with this socket or journal."
    SESSIONS_ELSEWHERE = "sessions-elsewhere", 503, "Kernels expect their broker at another socket."
    JOURNAL_ELSEWHERE = "journal-elsewhere", 503, "The kernels' sessions are in another journal."
    OUT_OF_REACH = "out-of-reach", 503, "Kernels have state on GPUs that this broker cannot see."
    NO_HEAD = "no-head", 503, "The head of the cluster, or its ledger, does not answer."
    NO_AUTHENTICATOR = "no-authenticator", 503, "MUNGE or the Hub cannot handle credentials now."
    UNREACHABLE = "unreachable", 503, "Another machine of the cluster does not answer."
    NO_MACHINE = "no-machine", 409, "No machine of the cluster can take the kernel."
    NOT_THERE = "not-there", 409, "The kernel needs something that the machine does not have."
    NO_CURVE = "no-curve", 409, "The kernel cannot encrypt its messages between machines."
    START_FAILED = "start-failed", 503, "The broker could not be started."
    START_TIMEOUT = "start-timeout", 503, "The broker did not start in time."
    KILLED = "killed", 503, "The broker was killed as it started."
    NOT_SERVED = "not-served", 503, "The broker serves only its own user."
    STANDS_ASIDE = "stands-aside", 503, "The machine's service has taken this broker's place."
    TOO_MANY = "too-many", 503, "The user has too many sessions, connections, requests or waits."
    ABUSE = "abuse", 503, "A client broke the socket's rules, so the broker closed its connection."
    VERSION = "version", 503, "The two sides speak different versions of the protocol."
    INTERNAL = "internal", 502, "The broker has a fault; its log has the details."
    JOURNAL = "journal", 409, "The journal cannot be read or written."
    NO_SPACE = "no-space", 503, "The disk has no room for the journal."
    JOURNAL_NEWER = "journal-newer", 409, "A newer version of jupyter_gpupool wrote the journal."
    BAD_RECORD = "bad-record", 502, "The start record of a broker cannot be trusted or read."

    # The machine and its driver.
    DRIVER = "driver", 502, "The CUDA driver or NVML failed."
    NO_DRIVER = "no-driver", 502, "The NVIDIA driver is missing, too old, or did not answer."
    NVML = "nvml", 502, "NVML did not answer."
    NO_EMULATOR = "no-emulator", 502, "The emulated driver is not compiled."
    BAD_FOLDER = "bad-folder", 502, "A folder cannot be made, or other users can enter it."

    # Configuration, kernelspecs, commands.
    CONFIG = "config", 502, "The configuration has an unknown name or a bad value."
    UNKNOWN_OPTION = "unknown-option", 502, "A kernelspec has an option that does not exist."
    KERNELSPEC = "kernelspec", 502, "The kernelspec cannot be read, written or removed."
    UNKNOWN_KERNELSPEC = "unknown-kernelspec", 502, "There is no such kernelspec."
    USAGE = "usage", 409, "A magic command was not understood."
    INSTALL = "install", 502, "The environment of the device processes could not be made."
    SERVICE = "service", 502, "The machine's service could not be installed or removed."
    NAME_TAKEN = "name-taken", 409, "A detached program of yours with this name runs already."
    UNKNOWN_PROGRAM = "unknown-program", 404, "No detached program of yours has this name."
    NOT_RUNNING = "not-running", 409, "The detached program has ended."
    NO_EXAMPLE = "no-example", 502, "The demo's notebook is not installed."
    NO_PACKAGES = "no-packages", 502, "The demo needs packages that are not installed."
    NO_LAB = "no-lab", 502, "JupyterLab is not installed."

    # Lines of the broker's log.
    OVERUSE = "overuse", 409, "A kernel uses more GPU memory than its slice has."
    STALE_COMPLETION = "stale-completion", 409, "The driver answered after the session had changed."
    INVALID_TRANSITION = "invalid-transition", 502, "A fault: a session changed state wrongly."

    # If no other code fits.
    REFUSED = "refused", 409, "The broker refused the request."
    ERROR = "error", 502, "Any other error."


class GPUPoolError(Exception):
    """Base of all errors of this package.

    Attributes
    ----------
    code:
        Stable word for programs, such as ``Code.OVER_QUOTA``.
    message:
        One sentence that says what was requested, and why this failed.
    next_step:
        What the user can do about the error; may be empty.
    details:
        The numbers behind the message, as JSON values.
    """

    code = Code.ERROR

    def __init__(
        self,
        message: str,
        *,
        code: Code | None = None,
        next_step: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.next_step = next_step
        self.details = dict(details or {})

    def __str__(self) -> str:
        return f"{self.message} {self.next_step}".rstrip()


class RefusedError(GPUPoolError):
    """The broker understood the request and refused it (quota, impossible, unknown session)."""

    code = Code.REFUSED


class BrokerUnavailable(GPUPoolError):
    """No broker listens at the socket, or the connection ended; the message names the socket."""

    code = Code.BROKER_UNAVAILABLE


class ProtocolError(GPUPoolError):
    """The other side sent something that is not a message of this protocol."""

    code = Code.PROTOCOL


class ConfigError(GPUPoolError):
    """The admin's configuration has an unknown name or a bad value."""

    code = Code.CONFIG


class DriverError(GPUPoolError):
    """The CUDA driver or NVML is missing, too old, or failed."""

    code = Code.DRIVER
