# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The child process that becomes the command: held back until it may start, then on its own.

The child stays in the process group of ``jupyter gpupool run``, so the terminal treats both alike:
Ctrl-C, Ctrl-Z and a change of the window's size reach the command without us, also in a pipeline.
(A group of its own, with the terminal handed over, would put the other commands of the pipeline
into the background.) What the terminal sends is therefore not sent on; what ``kill`` sends to us
alone is. sudo(8) without a pseudo-terminal does the same.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Mapping, NoReturn, Sequence

from .opening import numbered

#: Signals that are sent on to the command.
FORWARDED = frozenset(
    {
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGQUIT,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGWINCH,
        signal.SIGCONT,
        signal.SIGTSTP,
        signal.SIGALRM,
    }
)

#: All signals that we wait for instead of being interrupted by them.
AWAITED = FORWARDED | {signal.SIGCHLD}

#: Writing to the terminal from the background must not stop us (stty tostop).
_BLOCKED = AWAITED | {signal.SIGTTOU}

#: Exit codes of the shell: the command is there and no program, and it is not there.
NOT_EXECUTABLE, NOT_FOUND = 126, 127

#: The exit code of what the pool did not start, or ended: as of docker run(1).
NOT_RUN = 125

#: Signals whose default Python has changed for itself.
_PYTHONS = (signal.SIGPIPE, signal.SIGXFSZ)


def exit_code(status: int) -> int:
    """Return the exit code for a wait status, as a shell does: 128+n for signal n."""
    if os.WIFSIGNALED(status):
        return 128 + os.WTERMSIG(status)
    return os.WEXITSTATUS(status)


def cannot_run(program: str, environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the exit code and the reason if there is no such program; (0, "") if there is."""
    if shutil.which(program, path=environ.get("PATH")):
        return 0, ""
    if os.sep not in program:
        return NOT_FOUND, f"{program}: command not found"
    if Path(program).is_dir():
        return NOT_EXECUTABLE, f"{program}: is a directory"
    if Path(program).exists():
        return NOT_EXECUTABLE, f"{program}: is not executable"
    return NOT_FOUND, f"{program}: no such file"


def is_for_us_alone(info: signal.struct_siginfo, child: int) -> bool:
    """Return whether only this process received the signal, and not the command."""
    if info.si_code <= 0:
        return bool(info.si_pid != child)
    # The terminal sends it to the whole group; at a hang-up first to the leader of the session.
    return bool(info.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid())


def fill_standard_streams() -> None:
    """Open what is closed of 0, 1 and 2, so that no descriptor of ours is taken for a stream.

    For us alone: the command finds them closed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        pass
    os.close(descriptor)


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal, and so a shell that sees it stop."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class CommandProcess:
    """The process that becomes the command. Made before this process has a second thread.

    From then on the signals in :data:`AWAITED` are blocked here, for ``sigtimedwait``.

    Parameters
    ----------
    command:
        The program and its arguments.
    alone:
        Give it a session of its own, without a terminal: for a command that runs detached.
    output:
        A descriptor that becomes its output and its errors; None: as ours.
    """

    def __init__(
        self, command: Sequence[str], *, alone: bool = False, output: int | None = None
    ) -> None:
        was_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        orders, self._orders = os.pipe()
        self._report, report = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._orders)
            os.close(self._report)
            try:
                if alone:
                    os.setsid()
                if output is not None:
                    os.dup2(output, 1)
                    os.dup2(output, 2)
                for number in _PYTHONS:
                    signal.signal(number, signal.SIG_DFL)
                if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    signal.signal(signal.SIGINT, signal.SIG_DFL)
                if was_child is signal.SIG_IGN:
                    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
                _become(command, orders, report, parent)
            finally:
                os._exit(NOT_RUN)
        os.close(orders)
        os.close(report)
        #: How it ended; None while it has not.
        self.status: int | None = None
        self._stopped = False
        self._stopped_by: int | None = None
        #: Whether it was let start.
        self.started = False
        #: Why it could not be started; "" if it could, or has not been let.
        self.problem = ""

    def start(self, env: Mapping[str, str]) -> None:
        """Let it become the command with this environment."""
        self.started = True
        # In another session than ours the text of an environment need not be valid UTF-8.
        data = json.dumps(dict(env)).encode()
        try:
            while data:
                data = data[os.write(self._orders, data) :]
        except BrokenPipeError:
            pass  # it has ended already: the signal says why
        self._close_orders()
        said = b""
        while chunk := os.read(self._report, 4096):
            said += chunk
        self.problem = said.decode(errors="replace")

    def give_up(self) -> None:
        """End it, if it has not been let start."""
        self._close_orders()

    def send(self, number: int) -> None:
        """Send it a signal."""
        if self.status is None:
            os.kill(self.pid, number)

    def look(self) -> int | None:
        """Return the signal that has stopped it since the last look; note its end. Never waits."""
        self._note_states()
        number, self._stopped_by = self._stopped_by, None
        return number

    def wake(self) -> None:
        """Continue it, if it is still stopped as at the last look.

        ``fg`` of a shell wakes the whole process group. One more SIGCONT would come later than
        that one, and could end the stop of a second Ctrl-Z.
        """
        self._note_states()
        if self._stopped and self._stopped_by is None:
            self.send(signal.SIGCONT)

    def _note_states(self) -> None:
        while self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                break
            self._stopped = os.WIFSTOPPED(status)
            self._stopped_by = os.WSTOPSIG(status) if self._stopped else None
            if not self._stopped and not os.WIFCONTINUED(status):
                self.status = status

    def stop_as_it_did(self, number: int) -> None:
        """Stop this process as the command has stopped, until somebody wakes both."""
        # Sent before it is let through: Ctrl-Z has sent it to us as well, and both are one then.
        # Its default action does nothing in a group that no shell watches.
        os.kill(os.getpid(), number)
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.Signals(number)})
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _close_orders(self) -> None:
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1


def _become(command: Sequence[str], orders: int, report: int, parent: int) -> NoReturn:
    """Wait for the environment, then become the command; in the child, which never returns."""
    data = b""
    while chunk := os.read(orders, 1 << 16):
        data += chunk
    if not data:
        os._exit(NOT_RUN)  # the parent has given up, or was killed
    env = numbered(json.loads(data), parent)
    try:
        os.execvpe(command[0], list(command), env)
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        os.write(report, f"{command[0]}: {os.strerror(error.errno or 0)}".encode())
        os._exit(NOT_FOUND if missing else NOT_EXECUTABLE)
    os._exit(NOT_RUN)
