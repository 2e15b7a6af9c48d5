# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Kernels in containers share the machine's GPUs through one mounted folder."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from jupyter_gpupool import procfs
from jupyter_gpupool.devices.nvidia.members import session_members
from tests import namespaces
from tests.broker import kit
from tests.broker.kit import wait_until
from tests.broker.test_maintenance import maintain

from .kit import running

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the machine's broker"),
    pytest.mark.skipif(bool(namespaces.refusal()), reason=namespaces.refusal() or "none"),
]

#: Puts data on the device. A suspend must keep this data.
FILL = """
from cuda.core import Device
device = Device(); device.set_current(); stream = device.create_stream()
buffer = device.allocate(250 << 20, stream=stream); buffer.fill(%d, stream=stream); stream.sync()
print(device.uuid)
"""

#: Fails if a byte of the data has changed.
CHECK = """
import ctypes
from cuda.bindings import driver
host = (ctypes.c_ubyte * buffer.size)()
(error,) = driver.cuMemcpyDtoH(ctypes.addressof(host), int(buffer.handle), buffer.size)
assert int(error) == 0 and bytes(host) == bytes([%d]) * buffer.size
"""


@pytest.fixture(scope="module")
def site():
    with running(max_sessions_per_user=3) as found:
        yield found.started


@pytest.fixture
def machine(site):
    """The machine, without any container or user."""
    yield site
    site.clear()


def test_containers_with_one_user_id_share_gpus(machine):
    for name in ("ada", "bob"):
        machine.user(name)
    ada, bob = (machine.box(name).kernel() for name in ("ada", "bob"))
    # Both kernels have the same process number and user id, but belong to two users.
    assert ada.run("import os; print(os.getpid(), os.getuid())").endswith("1 1000")
    assert bob.run("import os; print(os.getpid(), os.getuid())").endswith("1 1000")
    home = ada.run(FILL % 7)
    assert bob.run(FILL % 9) != home
    owners = {session["owner"]: session for session in machine.status()["sessions"]}
    assert {name: s["guard"] and s["agent"] for name, s in owners.items()} == {
        "ada": True, "bob": True
    }  # fmt: skip

    # Each of the two GPUs has room for one kernel. So for ada's second kernel, the broker suspends
    # her first kernel or bob's kernel.
    second = machine.box("ada").kernel()
    second.run("%gpu 300MiB")
    second.run(FILL % 11)
    kept = {"ada": ada, "bob": bob}[
        next(s["owner"] for s in machine.status()["sessions"] if s["suspended_bytes"])
    ]
    (other,) = {ada, bob} - {kept}
    # Kill the broker. The next broker must find the processes and pages again.
    machine.kill()
    assert machine.started
    (home,) = (s["device"] for s in second.session["slices"])
    second.run("%gpu release")
    other.run(CHECK % {ada: 7, bob: 9}[other])
    kept.run(CHECK % {ada: 7, bob: 9}[kept])
    # Pause the GPU that the second kernel had. Its state must come back on the other GPU.
    maintain(machine, "pause", home)
    second.run(CHECK % 11)
    assert second.session["migrations"] == 1
    maintain(machine, "resume", home)
    other.run(CHECK % {ada: 7, bob: 9}[other])

    ada.kill()
    wait_until(
        lambda: [s["owner"] for s in machine.status()["sessions"]].count("ada") == 1,
        "the end of the killed container's session",
    )


#: The program of a hostile container: it sends requests, and prints the code of each answer.
ATTACKER = """
import json, os, socket, subprocess, sys
theirs, token, pid = sys.argv[1:]

def ask(*messages):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(os.environ["GPUPOOL_SOCKET"])
        file = connection.makefile("rb")
        found = []
        for at, message in enumerate(messages, 1):
            connection.sendall(json.dumps({"v": 1, "id": at, **message}).encode() + b"\\n")
            found.append(json.loads(file.readline() or b'{"code": "closed"}'))
        return found[-1]

found = {}
for kind, fields in {
    "release": {}, "close": {}, "request": {"memory": 1}, "keep": {"seconds": 60}, "end": {},
    "recall": {"after": 0, "reason": ""}, "launched": {"pid": os.getpid()}, "retire": {},
}.items():
    found[kind] = ask({"type": kind, "session": theirs, **fields}).get("code")
for kind, fields in {
    "hello": {}, "attach": {"pid": 1, "tid": 1}, "grow": {"device": 0, "bytes": 1}, "home": {},
    "page": {}, "land": {"step": "begin"},
}.items():
    message = {"type": kind, "session": theirs, "token": token, **fields}
    found[f"{kind} with the token"] = ask(message).get("code")
opened = {"type": "open", "kernel_id": "", "label": "mine"}
for who in (pid, 1 << 22):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["GPUPOOL_SOCKET"])
        file = connection.makefile("rb")
        connection.sendall(json.dumps({"v": 1, "id": 1, **opened}).encode() + b"\\n")
        own = json.loads(file.readline())["session"]
        named = {"type": "launched", "id": 2, "v": 1, "session": own, "pid": int(who)}
        connection.sendall(json.dumps(named).encode() + b"\\n")
        found[f"launched as another process ({who == pid})"] = json.loads(file.readline())["code"]
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(os.environ["GPUPOOL_SOCKET"])
    file = connection.makefile("rb")
    for at in range(4):
        connection.sendall(json.dumps({"v": 1, "id": at + 1, **opened}).encode() + b"\\n")
        answer = json.loads(file.readline())
        own = answer.get("session", own)
    found["a fourth session"] = answer["code"]
    child = subprocess.Popen([sys.executable, "-c", "open(0).read()"], stdin=subprocess.PIPE)
    named = {"type": "launched", "id": 9, "v": 1, "session": own, "pid": child.pid}
    connection.sendall(json.dumps(named).encode() + b"\\n")
    found["launched as its child"] = json.loads(file.readline())["type"]
    child.communicate()
status = ask({"type": "status"})
found["seen"] = sorted(set(json.dumps(status).split('"')) & {"ada", "secret.ipynb", pid, token})
found["rows"] = [r["kind"] for r in ask({"type": "journal"})["rows"] if r["session"] == theirs]
place = os.path.dirname(os.environ["GPUPOOL_SOCKET"])
for path in (f"{place}/broker.sock.pages", f"{place}/users", f"/proc/{pid}"):
    found[os.path.basename(os.path.dirname(path) if path.startswith("/proc") else path)] = (
        os.path.exists(path)
    )
try:
    with open(f"{place}/inside/start.py", "a"):
        found["written"] = True
except OSError as error:
    found["written"] = error.strerror
print(json.dumps(found))
"""


def test_container_cannot_reach_another_users_session(machine):
    for name in ("ada", "bob"):
        machine.user(name)
    ada = machine.box("ada").kernel(JPY_SESSION_NAME="secret.ipynb")
    ada.run(FILL % 7)
    mine, token = ada.run(
        "import os; print(*(os.environ[f'GPUPOOL_{n}'] for n in ('SESSION', 'TOKEN')))"
    ).split()[-2:]
    before = machine.session(mine)
    assert (before["owner"], before["label"]) == ("ada", "secret.ipynb")
    bob = machine.box("bob", uid=0)  # the container's root, without a user namespace
    found = json.loads(bob.run(ATTACKER, mine, token, before["pid"]))
    assert found == {
        **dict.fromkeys(("release", "close", "request", "keep", "end", "recall", "launched",
                         "retire"), "not-allowed"),
        **{f"{kind} with the token": "not-yours"
           for kind in ("hello", "attach", "grow", "home", "page", "land")},
        "launched as another process (True)": "no-process",
        "launched as another process (False)": "no-process",
        "launched as its child": "ok", "a fourth session": "too-many",
        "seen": [], "rows": [], "broker.sock.pages": False, "users": False, "proc": False,
        "written": "Read-only file system",
    }  # fmt: skip
    # A process in another container does not belong to the session, even if the process names the
    # session.
    root = procfs.identify(before["pid"])
    bob.start("-c", "input()", env={"GPUPOOL_SESSION": mine})
    wait_until(
        lambda: any(
            procfs.session_of(pid) == mine for pid in procfs.all_stats() if pid != root.pid
        ),
        "the process that names another's session",
    )
    assert [m.process for m in session_members(root, mine)] == [root]
    ada.run(CHECK % 7)
    after = machine.session(mine)
    assert after["state"] in ("active", "idle")
    assert [s["granted_bytes"] for s in after["slices"]] == [300 * kit.MiB]
    assert (after["request"], after["label"]) == (before["request"], before["label"])
    # A container without the mounted folder cannot reach the broker.
    text = machine.box().run(
        "import os, socket\n"
        "try: socket.socket(socket.AF_UNIX).connect(os.environ['GPUPOOL_SOCKET'])\n"
        "except FileNotFoundError: print('nothing')"
    )
    assert text == "nothing"


#: Connects to the broker, and prints a line when the connection ends.
CONNECTED = """
import os, socket
connection = socket.socket(socket.AF_UNIX)
connection.connect(os.environ["GPUPOOL_SOCKET"])
print("connected", flush=True)
print("ended", connection.recv(1), flush=True)
"""


def test_user_is_not_served_after_the_folder_is_removed(machine):
    folder = machine.user("ada")
    process = machine.box("ada").start("-c", CONNECTED, stdout=subprocess.PIPE)
    assert process.stdout.readline() == "connected\n"
    kit.remove(folder)
    assert process.stdout.readline() == "ended b''\n"
    process.stdout.close()
    machine.user("ada")  # the broker serves a new folder again


def test_folders_that_others_can_write_to_are_not_served(machine):
    users = machine.place / "users"
    assert users.stat().st_mode & 0o777 == 0o700
    for name in ("a b", "..x"):
        (users / name).mkdir()
    (users / "loose").mkdir()
    (users / "loose").chmod(0o777)
    (users / "link").symlink_to("/tmp")
    machine.user("ada")
    wait_until(
        lambda: machine.log.read_text().count("no socket for containers") == 4,
        "four refusals in the log",
    )
    assert [str(p.parent.name) for p in users.glob("*/broker.sock")] == ["ada"]
    assert not Path("/tmp/broker.sock").exists()


def test_container_in_a_user_namespace_is_served(machine):
    machine.user("ada")
    kernel = machine.box("ada", uid=0, users_from=200_000).kernel()
    assert kernel.run("import os; print(os.getuid())").endswith("0")
    kernel.run(FILL % 7)
    kernel.run("%gpu release")
    wait_until(lambda: kernel.session["suspended_bytes"], "its state in host memory")
    kernel.run(CHECK % 7)


def test_doctor_says_what_a_container_lacks(machine):
    machine.user("ada")
    box = machine.box("ada")
    text = box.run(DOCTOR)
    assert "and knows you as 'ada'" in text
    assert "this image's Python and C library can load the guard" in text
    writable = machine.box("ada", writable=True)
    with pytest.raises(AssertionError, match="Mount it read-only"):
        writable.run(DOCTOR)


#: The command in docs/containers.md.
DOCTOR = """
import os, sys
sys.path.insert(0, os.path.dirname(os.environ["GPUPOOL_SOCKET"]) + "/inside/python")
from jupyter_gpupool.cli import main
sys.exit(main(["doctor", "--inside"]))
"""


def test_container_without_memory_for_a_suspend_keeps_its_slice(machine):
    """The container has too little memory for a suspend of its kernel.

    So the kernel keeps running, and the status shows the reason.
    """
    machine.user("ada")
    kernel = machine.box("ada", memory=640 * kit.MiB).kernel()
    kernel.run("%gpu 480MiB")
    kernel.run(FILL.replace("250 << 20", "430 << 20") % 7)
    note = wait_until(lambda: kernel.session["host_note"], "the note")
    assert "cannot be moved to host memory here: control group /" in note
    assert "may use 640 MiB in all" in note
    assert kernel.run("print(buffer.size >> 20)") == "430"
