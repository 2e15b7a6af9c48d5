# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool run`` on a terminal: Ctrl-C, Ctrl-Z and fg, the window's size, the line."""

from __future__ import annotations

import re
import sys

from tests.broker.kit import wait_until

from .runkit import CLI, session_of, state_of

#: Counts what reaches it, and tells when asked to.
COUNTER = """
import os, signal, sys
counts = {}
def got(number, frame):
    name = signal.Signals(number).name
    counts[name] = counts.get(name, 0) + 1
    print("<%s>" % name, flush=True)
for name in ("INT", "WINCH", "CONT"):
    signal.signal(getattr(signal, f"SIG{name}"), got)
print("<ready>", flush=True)
for line in sys.stdin:
    size = os.get_terminal_size(0)
    print("<size %dx%d %s>" % (*size, sorted(counts.items())), flush=True)
    if line.strip() == "end":
        break
sys.exit(3)
"""

#: A shell with job control, as far as it is needed: runs its arguments, says what becomes of it.
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
    assert sys.stdin.readline().strip() == "fg"
    os.tcsetpgrp(0, child)
    os.killpg(child, signal.SIGCONT)
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


def test_ctrl_z_stops_both_and_fg_wakes_both(broker, terminal):
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
    """The system tells the leader of the terminal's session alone, which is ``run`` here."""
    told = broker.folder / "told"
    code = f"""
import os, signal
signal.signal(signal.SIGHUP, lambda *_: (os.open({str(told)!r}, os.O_CREAT), os._exit(6)))
print("<ready>", flush=True)
while True:
    signal.pause()
"""
    screen = terminal([*CLI, "run", "--", sys.executable, "-c", code])
    screen.read_until(b"<ready>")
    screen.hang_up()
    wait_until(told.exists, "the command's handler")
    assert screen.wait() == 6
    told.unlink()


def test_pipeline_keeps_the_terminal(terminal):
    """Another command of the pipeline may read the terminal while ours is in it."""
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
    screen.read_until(b"\rWaiting")  # drawn again, in its place
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
