# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool run`` on a terminal: Ctrl-C, Ctrl-Z and fg, the window's
size, and the wait's line.
"""

from __future__ import annotations

import re
import subprocess
import sys

from tests.broker import kit
from tests.broker.kit import wait_until

from .runkit import CLI, session_of, state_of

#: A program that counts the signals that it gets. It prints the counts for each line that it reads.
#: For each signal, Python also writes to a pipe, and this write ends the program's wait for a line.
#: Without the pipe, the handler of a signal just before the wait would run only after the wait.
COUNTER = """
import os, select, signal, sys
told, tell = os.pipe()
os.set_blocking(tell, False)
signal.set_wakeup_fd(tell)
counts = {}
def got(number, frame):
    name = signal.Signals(number).name
    counts[name] = counts.get(name, 0) + 1
    print("<%s>" % name, flush=True)
for name in ("INT", "WINCH", "CONT"):
    signal.signal(getattr(signal, f"SIG{name}"), got)
print("<ready>", flush=True)
while True:
    if told in select.select([0, told], [], [])[0]:
        os.read(told, 99)
        continue
    line = sys.stdin.readline()
    size = os.get_terminal_size(0)
    print("<size %dx%d %s>" % (*size, sorted(counts.items())), flush=True)
    if line.strip() == "end":
        break
sys.exit(3)
"""

#: A small shell with the job control that the tests need. Its arguments are a command. The shell
#: runs this command, and prints when the command stops or ends.
SHELL = """
import os, signal, sys
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
child = os.fork()
if child == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    os.execv(sys.argv[1], sys.argv[1:])
while True:
    _, status = os.waitpid(child, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpgrp())
    if not os.WIFSTOPPED(status):
        print("<ended %d>" % os.waitstatus_to_exitcode(status), flush=True)
        break
    print("<stopped %s>" % signal.Signals(os.WSTOPSIG(status)).name, flush=True)
    order = sys.stdin.readline().strip()
    os.tcsetpgrp(0, child)
    (os.kill if order == "wake run alone" else os.killpg)(child, signal.SIGCONT)
"""

COMMAND = [sys.executable, "-c", COUNTER]


def shell(command, *options):
    return [sys.executable, "-c", SHELL, *CLI, "run", "--name", "tty", *options, "--", *command]


def test_ctrl_c_reaches_the_command_once(terminal):
    screen = terminal(shell(COMMAND))
    screen.read_until(b"<ready>")
    screen.type(b"\x03")
    screen.read_until(b"<SIGINT>")
    screen.type(b"how\n")
    screen.read_until(b"[('SIGINT', 1)]>")
    screen.type(b"end\n")
    screen.read_until(b"<ended 3>")


def test_ctrl_c_ends_a_command_that_does_not_handle_it(terminal):
    screen = terminal(shell(["sh", "-c", "echo '<ready>'; exec sleep 600"]))
    screen.read_until(b"<ready>")
    screen.type(b"\x03")
    screen.read_until(b"<ended 130>")


def test_ctrl_z_stops_and_fg_wakes_both_run_and_command(broker, terminal):
    screen = terminal(shell(COMMAND))
    screen.read_until(b"<ready>")
    for _ in range(2):
        screen.type(b"\x1a")
        screen.read_until(b"<stopped SIGTSTP>")
        assert session_of(broker, "tty") is not None
        screen.type(b"fg\n")
        screen.read_until(b"<SIGCONT>")
    screen.type(b"end\n")
    screen.read_until(b"<ended 3>")


#: A program that stops a command, continues it, and stops it again. Then it calls ``wake`` twice:
#: before it has seen the second stop by ``look``, and after this. The first call belongs to the
#: first stop. After each call, the program prints whether the command runs again.
LATE = """
import os, signal
from pathlib import Path
from jupyter_gpupool.programs.terminal import CommandProcess

command = CommandProcess(["sleep", "600"])
command.start(os.environ)
ours = Path(f"/proc/{command.pid}/stat")
looks = []

def is_stopped():
    return ours.read_text().rpartition(")")[2].split()[0] == "T"

def stop():
    command.send(signal.SIGSTOP)
    os.waitid(os.P_PID, command.pid, os.WSTOPPED | os.WNOWAIT)

stop()
looks.append(command.look())
command.send(signal.SIGCONT)
stop()
command.wake()
print("woken by an order for the first stop:", not is_stopped())
looks.append(command.look())
command.wake()
print("woken after a look:", not is_stopped())
print("looks:", looks == [signal.SIGSTOP] * 2)
command.send(signal.SIGKILL)
"""


def test_second_stop_is_not_ended_by_a_wake_for_the_first():
    """``fg`` sends SIGCONT to ``run``. Perhaps ``run`` handles it so late that the next Ctrl-Z has
    already stopped the command. Then ``run`` must not continue the command.
    """
    done = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, timeout=60, cwd=kit.ROOT
    )
    assert done.stdout.splitlines() == [
        "woken by an order for the first stop: False",
        "woken after a look: True",
        "looks: True",
    ], done.stderr


def test_wake_signal_sent_only_to_run_reaches_the_command(terminal):
    screen = terminal(shell(COMMAND))
    screen.read_until(b"<ready>")
    screen.type(b"\x1a")
    screen.read_until(b"<stopped SIGTSTP>")
    screen.type(b"wake run alone\n")
    screen.read_until(b"<SIGCONT>")


def test_command_sees_the_size_of_the_window(terminal):
    screen = terminal(shell(COMMAND))
    screen.read_until(b"<ready>")
    screen.resize(101, 33)
    screen.read_until(b"<SIGWINCH>")
    screen.type(b"how\n")
    screen.read_until(b"<size 101x33 [('SIGWINCH', 1)]>")
    screen.type(b"end\n")
    screen.read_until(b"<ended 3>")


def test_hang_up_reaches_the_command(broker, terminal):
    """Linux sends SIGHUP only to the leader of the terminal's session, which is ``run`` here.

    So ``run`` must send SIGHUP to the command. The terminal may close before the command has
    written its line, so the command ignores an error of this write.
    """
    told = broker.folder / "told"
    code = f"""
import contextlib, os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGHUP}})
with contextlib.suppress(OSError):
    print("<ready>", flush=True)
signal.sigwait({{signal.SIGHUP}})
os.open({str(told)!r}, os.O_CREAT)
os._exit(6)
"""
    screen = terminal([*CLI, "run", "--", sys.executable, "-c", code])
    screen.read_until(b"<ready>")
    screen.hang_up()
    wait_until(told.exists, "the command's handler")
    assert screen.wait() == 6
    told.unlink()


def test_pipeline_keeps_the_terminal(terminal):
    """The other commands of a pipeline can read the terminal while ``run`` is a part of it."""
    line = " ".join([*CLI, "run", "--", "echo", "data"])
    reader = f"{sys.executable} -c 'print(open(0).read(), open(\"/dev/tty\").readline())'"
    screen = terminal(["/bin/sh", "-c", f"{line} | {reader}"])
    screen.type(b"typed\n")
    screen.read_until(b"data")
    screen.read_until(b"typed")
    assert screen.wait() == 0


def test_wait_shows_one_line_and_then_removes_it(broker, program, terminal):
    first = program("--attach", "hold", "--name", "first", command=["cat"])
    wait_until(lambda: state_of(broker, "first") == "active", "the first")
    words = [*CLI, "run", "--attach", "hold", "--name", "tty", "--", "echo", "<turn>"]
    screen = terminal(words)
    screen.resize(60, 24)
    screen.read_until(b"\rWaiting for a GPU slice of 300 MiB: position 1 of 1")
    line = screen.read_until(b"\x1b[K")
    assert b"\n" not in line
    screen.read_until(b"\rWaiting")  # "run" writes the line again in the same place
    first.end()
    rest = screen.read_until(b"<turn>")
    assert rest.endswith(b"\r\x1b[K"), "the line is gone"
    assert b"\n" not in rest
    assert not re.search(rb"[^\r]{60,}", rest.replace(b"\x1b[K", b"")), "no line is too long"
    assert screen.wait() == 0


def test_ctrl_c_ends_the_wait(broker, program, terminal):
    program("--attach", "hold", "--name", "first", command=["cat"])
    wait_until(lambda: state_of(broker, "first") == "active", "the first")
    screen = terminal(shell(["echo", "never"], "--attach", "hold"))
    wait_until(lambda: state_of(broker, "tty") == "queued", "the wait")
    screen.type(b"\x03")
    assert b"never" not in screen.read_until(b"<ended 130>")
    wait_until(lambda: session_of(broker, "tty") is None, "the session's end")
