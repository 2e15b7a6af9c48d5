# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The child process that becomes the command. It waits until the parent lets it start.

The child stays in the process group of ``jupyter gpupool run``. So the terminal sends the signals
of Ctrl-C, of Ctrl-Z and of a change of the window's size to both processes, also in a pipeline, and
``run`` does not forward these signals. ``run`` forwards only signals that another process sends to
``run`` alone, for example with ``kill``. sudo(8) without a pseudo-terminal does the same. (A
process group of its own would not work for the child: only one group of a terminal is in the
foreground, and the other commands of a pipeline would then be in the background.)
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

#: Signals that this process forwards to the command.
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

#: All signals that this process waits for with sigtimedwait. It blocks them, so that they do not
#: interrupt its other work.
AWAITED = FORWARDED | {signal.SIGCHLD}

#: After ``stty tostop``, a background process that writes to the terminal gets SIGTTOU. This
#: process blocks SIGTTOU, too, so that the write does not stop it.
_BLOCKED = AWAITED | {signal.SIGTTOU}

#: The exit code is NOT_EXECUTABLE if the command's file cannot be executed, and NOT_FOUND if the
#: command does not exist. A shell uses the same codes.
NOT_EXECUTABLE, NOT_FOUND = 126, 127

#: The exit code if the pool has not started the command, or has ended the command. docker run(1)
#: uses the same code.
NOT_RUN = 125

#: Python ignores these signals. The command gets their default action again.
_PYTHONS = (signal.SIGPIPE, signal.SIGXFSZ)


def exit_code(status: int) -> int:
    """Return the exit code for a wait status. As in a shell, it is 128+n for signal n."""
    if os.WIFSIGNALED(status):
        return 128 + os.WTERMSIG(status)
    return os.WEXITSTATUS(status)


def cannot_run(program: str, environ: Mapping[str, str]) -> tuple[int, str]:
    """Return the exit code and the reason if ``program`` cannot run; (0, "") if it can."""
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
    """Return whether this process got the signal, but the command did not."""
    if info.si_code <= 0:
        return bool(info.si_pid != child)
    # The terminal sends a signal to all processes of the group. There is one exception: when the
    # terminal hangs up, the first SIGHUP goes only to the leader of the process session.
    return bool(info.si_signo == signal.SIGHUP and os.getsid(0) == os.getpid())


def fill_standard_streams() -> None:
    """Open the descriptors 0, 1 and 2 if they are closed, so that no other file gets their numbers.

    The command does not inherit the new descriptors.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        pass
    os.close(descriptor)


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal.

    If it has one, a shell watches this process and notices when the process stops.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


class CommandProcess:
    """The process that becomes the command.

    Make this object before this process has a second thread. The object blocks the signals in
    :data:`AWAITED` in this process, for ``sigtimedwait``.

    Parameters
    ----------
    command:
        The program and its arguments.
    alone:
        Give the command its own process session, without a terminal. This is for a detached
        command.
    output:
        A descriptor for the command's output and errors; None means that the command inherits both
        from this process.
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
        #: The wait status of the command's end; None while it runs.
        self.status: int | None = None
        self._stopped = False
        self._stopped_by: int | None = None
        #: Whether the child was allowed to start the command.
        self.started = False
        #: Why the start of the command failed; "" if no start has failed.
        self.problem = ""

    def start(self, env: Mapping[str, str]) -> None:
        """Let the child become the command with this environment."""
        self.started = True
        # An environment may contain text that is not valid UTF-8. json.dumps can write such text,
        # because its output is only ASCII.
        data = json.dumps(dict(env)).encode()
        try:
            while data:
                data = data[os.write(self._orders, data) :]
        except BrokenPipeError:
            pass  # the child has already ended; its wait status says why
        self._close_orders()
        said = b""
        while chunk := os.read(self._report, 4096):
            said += chunk
        self.problem = said.decode(errors="replace")

    def give_up(self) -> None:
        """End the child if it has not yet become the command."""
        self._close_orders()

    def send(self, number: int) -> None:
        """Send the command a signal."""
        if self.status is None:
            os.kill(self.pid, number)

    def look(self) -> int | None:
        """Return the signal that has stopped the command since the last call; None if none has.

        This function also sets :attr:`status` if the command has ended. It never waits.
        """
        self._note_states()
        number, self._stopped_by = self._stopped_by, None
        return number

    def wake(self) -> None:
        """Continue the command if it is stopped, and :meth:`look` has already reported the stop.

        A shell's ``fg`` sends SIGCONT to this process and to the command. This process then sends
        the command a second SIGCONT. If the user stops the command with Ctrl-Z between the two, the
        second SIGCONT must not continue the command.
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
        """Stop this process with the signal that stopped the command, until both are continued."""
        # This process sends the signal to itself while it blocks the signal, and then unblocks it.
        # After Ctrl-Z, the terminal has already sent the same signal to this process. Two pending
        # signals of one number arrive as one, so this process stops only once. In a process group
        # that no shell watches, the signal has no effect.
        os.kill(os.getpid(), number)
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.Signals(number)})
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _close_orders(self) -> None:
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1


def _become(command: Sequence[str], orders: int, report: int, parent: int) -> NoReturn:
    """Wait for the environment, then become the command.

    This runs in the child and never returns.
    """
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
