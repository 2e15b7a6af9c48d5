# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter_gpupool.slice`` in scripts that ``run`` or a user starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.broker import kit
from tests.broker.kit import MiB, wait_until
from tests.emulated import library_dir

from .runkit import Program, environment, run, session_of, state_of

#: Each script begins with this code. The function ``cuda`` calls the driver. The function ``tell``
#: prints its words, and waits until the test sends a line.
BEGIN = """
import ctypes, os, subprocess, sys
import jupyter_gpupool
from jupyter_gpupool.errors import GPUPoolError, RefusedError

def cuda(name, *args):
    return getattr(ctypes.CDLL("libcuda.so.1"), name)(*args)

def context():
    found = ctypes.c_void_p()
    for call in (("cuInit", 0), ("cuDevicePrimaryCtxRetain", ctypes.byref(found), 0),
                 ("cuCtxSetCurrent", found)):
        assert cuda(*call) == 0, call

LAST = []

def alloc(mib):
    pointer = ctypes.c_uint64()
    LAST.append(pointer)
    return cuda("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(mib << 20))

def free():
    assert cuda("cuMemFree_v2", LAST.pop()) == 0

def tell(*words):
    print(*words, flush=True)
    sys.stdin.readline()
"""


class Script:
    """A script that stops at each ``tell`` until the test lets it continue."""

    def __init__(self, broker, code, *command, **env):
        path = broker.folder / "work.py"
        path.write_text(BEGIN + code)
        self.process = subprocess.Popen(
            [*command, sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=environment(broker, **driver(broker), **env), cwd=kit.ROOT, text=True,
        )  # fmt: skip

    def said(self):
        line = self.process.stdout.readline()
        assert line, "the script has ended"
        return line.strip()

    def go_on(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self):
        self.go_on()
        self.process.stdin.close()
        code = self.process.wait(90)
        self.process.stdout.close()
        return code

    def close(self):
        self.process.kill()
        self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout):
            try:
                stream.close()
            except BrokenPipeError:
                pass


def driver(broker):
    """Return the environment variables with which a script finds the emulated driver."""
    state = Path(f"{broker.socket}.emulated")
    machine = broker.status()["machine"].removeprefix("EMULATED ")
    return {
        "LD_LIBRARY_PATH": str(library_dir()),
        "EMUCUDA_STATE": str(state),
        "EMUCUDA_MACHINE": machine,
    }


@pytest.fixture
def script(broker):
    made = []

    def make(code, *command, **env):
        made.append(Script(broker, code, *command, **env))
        return made[-1]

    yield make
    for one in made:
        one.close()


RUN = [sys.executable, "-m", "jupyter_gpupool.cli", "run", "--name", "work.py", "--"]


def test_block_takes_a_slice_without_the_run_command(broker, script):
    one = script("""
with jupyter_gpupool.slice("100MiB", limit="100MiB") as gpu:
    context()
    tell("held", gpu.memory >> 20, len(gpu.devices), gpu.guarded, alloc(50), alloc(400))
tell("after", gpu)
with jupyter_gpupool.slice("100MiB", limit="100MiB") as gpu:
    tell("again", alloc(1), str(gpu).partition(" on ")[0])
""")
    assert one.said() == "held 100 1 True 0 2"
    session = session_of(broker, "work.py")
    assert (session["state"], session["guard"]) == ("active", True)
    assert session["pid"] == one.process.pid
    one.go_on()
    assert one.said() == "after <GPU slice, not held>"
    wait_until(lambda: state_of(broker, "work.py") == "idle", "it rests")
    assert session_of(broker, "work.py")["holds"] == []
    one.go_on()
    assert one.said() == "again 0 <GPU slice of 100 MiB"
    assert one.end() == 0
    wait_until(lambda: session_of(broker, "work.py") is None, "the session's end")


def test_libraries_use_the_guard_that_the_block_has_loaded(script):
    one = script("""
import pynvml
from cuda.bindings import driver
with jupyter_gpupool.slice("100MiB", limit="100MiB"):
    assert driver.cuInit(0)[0] == 0
    context = driver.cuDevicePrimaryCtxRetain(0)[1]
    driver.cuCtxSetCurrent(context)
    pynvml.nvmlInit()
    memory = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
    tell(driver.cuMemAlloc(200 << 20)[0].name, driver.cuMemGetInfo()[2] >> 20, memory.total >> 20)
""")
    assert one.said() == "CUDA_ERROR_OUT_OF_MEMORY 100 100"
    assert one.end() == 0


def test_idle_slice_after_the_block_goes_to_a_waiting_program(broker, script, program):
    one = script("""
with jupyter_gpupool.slice("300MiB"):
    context()
    assert alloc(200) == 0
tell("after")
assert alloc(1) == 0
tell("back")
""")
    assert one.said() == "after"
    other = program("--attach", "hold", "--name", "other", command=["cat"])
    wait_until(lambda: state_of(broker, "other") == "active", "the other has it")
    assert state_of(broker, "work.py") == "detached"
    other.end()
    one.go_on()
    assert one.said() == "back", "under the guard a call outside of the block waits for a slice"
    assert one.end() == 0


def test_block_changes_the_request_of_a_run_command(broker, script):
    one = script("""
with jupyter_gpupool.slice("200MiB", compute=50) as gpu:
    context()
    tell("held", gpu.memory >> 20, gpu.guarded, alloc(150))
tell("after")
with jupyter_gpupool.slice("250MiB", compute=60) as gpu:
    tell("more", gpu.memory >> 20)
    free()
tell("freed")
""", *RUN[:-1], "--memory", "100MiB", "--limit", "100MiB", "--")  # fmt: skip
    assert one.said() == "held 200 True 0"
    session = session_of(broker, "work.py")
    assert session["request"]["compute"] == 50
    assert [hold["id"].split("-")[0] for hold in session["holds"]] >= ["device"]
    assert len(broker.status()["sessions"]) == 1
    one.go_on()
    assert one.said() == "after"
    request = session_of(broker, "work.py")["request"]
    assert (request["memory"], request["compute"]) == (200 * MiB, 100), "its memory is in use"
    one.go_on()
    assert one.said() == "more 250"
    one.go_on()
    assert one.said() == "freed"
    assert session_of(broker, "work.py")["request"]["memory"] == 200 * MiB, "as before the block"
    assert one.end() == 0


def test_refusal_is_an_error_with_a_code(broker, script):
    one = script("""
for options in ({"memory": "9TiB"}, {"memory": "12"}, {"memory": 8}, {"priority": "royal"},
                {"max_wait": "x"}):
    try:
        with jupyter_gpupool.slice(**options):
            print("held")
    except RefusedError as error:
        print(error.code, str(error)[:60])
tell("done")
""")
    assert one.said().startswith("over-device 9 TiB")
    assert one.said().startswith("bad-request The memory is wrong: '12' has no unit")
    assert one.said().startswith("bad-request The memory is wrong: 8 is less than 1 MiB.")
    assert one.said().startswith("unknown-priority")
    assert one.said().startswith("bad-request The value of max_wait is wrong: 'x' is not a")
    assert one.said() == "done"
    assert one.end() == 0


@pytest.mark.parametrize("command", [[], RUN], ids=["by hand", "in run"])
def test_max_wait_is_an_error_with_a_code(broker, script, program, command):
    other = program("--attach", "hold", "--name", "other", command=["cat"])
    wait_until(lambda: state_of(broker, "other") == "active", "the other")
    one = script("""
try:
    with jupyter_gpupool.slice("300MiB", max_wait=2):
        print("held")
except RefusedError as error:
    tell(error.code, error)
with jupyter_gpupool.slice("300MiB"):
    tell("held")
""", *command)  # fmt: skip
    said = one.said()
    why = "wait-timeout No GPU slice became free within 2 s (max_wait). The last reason: "
    assert said.startswith(why), said
    wait_until(lambda: session_of(broker, "work.py")["holds"] == [], "the end of its wait")
    one.go_on()
    other.end()
    assert one.said() == "held"
    assert one.end() == 0


def test_a_program_that_has_called_cuda_is_refused(script):
    one = script("""
assert cuda("cuInit", 0) == 0
try:
    with jupyter_gpupool.slice("100MiB"):
        print("held")
except RefusedError as error:
    tell(error.code, error)
""")
    assert one.said().startswith("devices-bound This program has called CUDA already")
    assert one.end() == 0


def test_program_with_a_loaded_driver_needs_allow_unguarded(broker, script, make_broker):
    code = """
ctypes.CDLL("libcuda.so.1")
try:
    with jupyter_gpupool.slice("300MiB") as gpu:
        context()
        print("held", gpu.guarded, alloc(10), flush=True)
        size = ctypes.c_size_t(10 << 20)
        assert cuda("cuMemsetD8_v2", LAST[-1], ctypes.c_ubyte(7), size) == 0
        tell("filled")
    tell("after")
    with jupyter_gpupool.slice():
        host = ctypes.create_string_buffer(size.value)
        assert cuda("cuMemcpyDtoH_v2", host, LAST[-1], size) == 0
        tell("same", host.raw == bytes([7]) * size.value)
except RefusedError as error:
    tell(error.code, error)
"""
    one = script(code)
    said = one.said()
    assert said.startswith("no-guard This program has already loaded the CUDA driver"), said
    assert one.end() == 0
    lax = make_broker(emulate="1x512MiB,context=32MiB", allow_unguarded=True).started
    two = Script(lax, code)
    try:
        assert two.said() == "held False 0"
        assert two.said() == "filled"
        assert session_of(lax, "work.py")["state"] == "active"
        two.go_on()
        assert two.said() == "after"
        other = Program(lax, "--attach", "hold", "--name", "other", command=["cat"])
        wait_until(lambda: state_of(lax, "other") == "active", "the other has it")
        assert session_of(lax, "work.py")["suspended_bytes"] > 0
        assert other.end() == 0
        other.close()
        two.go_on()
        assert two.said() == "same True"
        assert two.end() == 0
    finally:
        two.close()


def test_children_share_the_slice_of_a_script(broker, script):
    one = script("""
def child(code):
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout

with jupyter_gpupool.slice("200MiB", limit="200MiB"):
    context()
    forked = os.fork()
    if not forked:
        with jupyter_gpupool.slice():
            os._exit(4)
    forked = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
    code = open(__file__).read().split("def child")[0]
    code += '''
with jupyter_gpupool.slice() as gpu:
    context()
    print(gpu.memory >> 20, gpu.guarded, alloc(300))
'''
    tell(forked, child(code).strip())
""")
    assert one.said() == "4 200 True 2"
    assert len(broker.status()["sessions"]) == 1
    assert one.end() == 0


def test_nested_blocks_make_one_request(script):
    one = script("""
with jupyter_gpupool.slice("200MiB"):
    with jupyter_gpupool.slice("100MiB") as inner:
        print(inner.memory >> 20)
    try:
        with jupyter_gpupool.slice("300MiB"):
            print("held")
    except RefusedError as error:
        tell(error)
""")
    assert one.said() == "200"
    assert "with memory=200 MiB, and a second block asks for memory=300 MiB" in one.said()
    assert one.end() == 0


def test_block_continues_while_the_broker_is_away(folder, make_broker):
    broker = make_broker(emulate="1x512MiB,context=32MiB").started
    one = Script(broker, """
with jupyter_gpupool.slice("100MiB"):
    context()
    tell("held")
    assert alloc(10) == 0
    tell("still held")
""")  # fmt: skip
    try:
        assert one.said() == "held"
        pid = broker.status()["pid"]
        broker.kill()

        def back():
            from jupyter_gpupool.errors import GPUPoolError

            try:
                return broker.status()["pid"] != pid and session_of(broker, "work.py")["holds"]
            except GPUPoolError:
                return False

        wait_until(back, "another broker, with the hold")
        one.go_on()
        assert one.said() == "still held"
        wait_until(
            lambda: any(
                hold["id"].startswith("slice-") for hold in session_of(broker, "work.py")["holds"]
            ),
            "the hold",
        )
        assert one.end() == 0
    finally:
        one.close()
        os.kill(broker.status()["pid"], 15)
        wait_until(lambda: not broker.socket.exists(), "the broker's end")


def test_block_cannot_change_the_group_of_its_session(make_broker):
    groups = {"vision": {"users": "*", "order": 1}, "speech": {"users": "*"}}
    broker = make_broker(groups=groups, emulate="1x512MiB,context=32MiB").started
    one = Script(broker, """
for group in ("speech", "vision"):
    try:
        with jupyter_gpupool.slice(group=group):
            print("held")
    except RefusedError as error:
        tell(error.code, error)
""")  # fmt: skip
    try:
        assert one.said() == "held"
        assert one.said().startswith(
            "not-in-group The session of this program is in the group 'speech', not in 'vision'."
        )
        assert one.end() == 0
    finally:
        one.close()


def test_no_broker_is_an_error(broker, script):
    one = script("""
os.environ["GPUPOOL_SOCKET"] = "relative"
try:
    with jupyter_gpupool.slice():
        print("held")
except GPUPoolError as error:
    tell(type(error).__name__, error.code)
""")
    assert one.said() == "BrokerUnavailable bad-socket"
    assert one.end() == 0
    assert run(broker, "status").returncode == 0
