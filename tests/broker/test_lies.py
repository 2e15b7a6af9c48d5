# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Clients that lie, and users who read each other's data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpupool.client import Client
from jupyter_gpupool.errors import BrokerUnavailable, GPUPoolError, RefusedError
from tests.emulated import library_dir

from . import kit
from .kit import Kernel, Raw, wait_until

NOBODY = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


def refusal(client, message, /, **fields):
    with pytest.raises(RefusedError) as caught:
        client.call(message, **fields)
    return caught.value.code


def ping_until_closed(client):
    while True:
        client.call("ping")


def pool_is_fine(broker):
    return broker.process.poll() is None and broker.status()["pid"] == broker.process.pid


def test_wrong_token_is_refused_and_closes_the_connection(broker, kernel):
    def abuse():
        return broker.status()["broker"]["counters"]["closed_for_abuse"]

    one, before = kernel("one", agent=False), abuse()
    with broker.client() as client:
        assert refusal(client, "hello", session=one.session, token="guess") == "bad-token"
        with pytest.raises(BrokerUnavailable):
            ping_until_closed(client)
    assert abuse() == before + 1


def test_right_token_from_the_wrong_process_is_refused(broker, kernel):
    one = kernel("one", agent=False)
    with broker.client() as client:
        assert refusal(client, "hello", session=one.session, token=one.token) == "not-yours"
    one.do("start")
    wait_until(lambda: one.link()["greeted"], "the true agent")


def test_child_of_the_kernel_may_be_its_agent(broker, kernel):
    one = kernel("one", agent=False)
    one.do("start_in_child")
    wait_until(lambda: broker.session(one.session)["agent"], "the child's hello")


@pytest.mark.parametrize("pid", [-1, 0, 2**22 - 1, 10**9])
def test_missing_process_is_refused(broker, kernel, pid):
    one = kernel("one", launch=False)
    assert refusal(one.server, "launched", session=one.session, pid=pid) == "no-process"


def test_session_has_one_process_and_process_has_one_session(broker, kernel):
    one, two = kernel("one"), kernel("two", launch=False)
    taken = one.process.pid
    assert refusal(two.server, "launched", session=two.session, pid=taken) == "already-launched"
    assert (
        refusal(one.server, "launched", session=one.session, pid=os.getpid()) == "already-launched"
    )
    one.server.call("launched", session=one.session, pid=taken)  # the same process is allowed again


@root_only
def test_process_of_another_user_is_refused(broker, kernel):
    one = kernel("one", launch=False)
    other = subprocess.Popen(["sleep", "600"], user=NOBODY)
    try:
        assert refusal(one.server, "launched", session=one.session, pid=other.pid) == "not-yours"
    finally:
        other.kill()
        other.wait(60)
    # After the attempt, the broker closes the connection that opened the session. The session has
    # no process, so it ends with this connection.
    wait_until(lambda: broker.session(one.session) is None, "the end of the session")
    assert pool_is_fine(broker)


@pytest.mark.parametrize("kind", ["launched", "release", "keep", "request", "hello"])
def test_unknown_sessions_are_refused(broker, kind):
    fields = {"pid": os.getpid(), "seconds": 1, "token": "t"}
    with broker.client() as client:
        assert refusal(client, kind, session="nope", **fields) == "unknown-session"


def test_closing_an_unknown_session_changes_nothing(broker, kernel):
    """The session may be closed already. This is no error, and it ends no other session."""
    one = kernel("one", launch=False)
    one.server.call("close", session="nope")
    assert [row["kind"] for row in broker.rows("open", "close")] == ["open"]
    assert [s["id"] for s in broker.status()["sessions"]] == [one.session]


def test_messages_of_an_agent_need_a_hello(broker):
    with broker.client() as client:
        assert refusal(client, "hold", hold="h", kind="cell", wait=True) == "unknown-session"
        assert refusal(client, "cancel", hold="h") == "unknown-session"
        assert refusal(client, "release") == "unknown-session"


@pytest.mark.parametrize(
    "data",
    [b"\n" * 50, b"{" * 1000 + b"\n", os.urandom(5000), b'{"v":1,"type":"ping"}\n' * 60_000],
    ids=["lines", "braces", "noise", "flood"],
)
def test_rubbish_and_floods_do_not_reach_the_pool(broker, kernel, data):
    one = kernel("one")
    one.attach()
    with Raw(broker.socket) as raw:
        try:
            raw.send(data)
            raw.socket.shutdown(1)
            raw.read_all()
        except OSError:
            pass  # the broker closed the connection
    assert one.do("take", hold="more")
    assert pool_is_fine(broker)
    one.wait_state("active")


def test_message_of_another_version_gets_a_version_error(broker):
    with Raw(broker.socket) as raw:
        raw.send(b'{"v":99,"type":"ping","id":1}\n')
        answer = raw.read()
    assert (answer["type"], answer["code"]) == ("error", "version")
    assert "same version" in answer["next_step"]


def test_waits_on_one_connection_are_bounded(broker, kernel):
    blocker = [kernel(n, memory=400 << 20) for n in ("a", "b")]
    for one in blocker:
        one.attach()
    one = kernel("one", memory=400 << 20)
    for number in range(256):
        one.do("ask", hold=f"h{number}")
    one.do("ask", hold="one-too-many")
    assert one.refused("got", hold="one-too-many") == "too-many"
    one.do("drop", hold="h0")
    blocker[0].do("drop", hold="cell")
    one.do("got", hold="h255")

    # The user has sent many requests. So a status may be up to a quarter of a second old.
    def holds():
        found = broker.session(one.session)
        return len(found["holds"]) if found else 0

    wait_until(lambda: holds() == 255, "all holds but the dropped one")


SPY = """
import json, os, sys
from jupyter_gpupool.client import Client
from jupyter_gpupool.errors import GPUPoolError
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
client = Client(sys.argv[1])
answers = []
for kind, fields in json.loads(sys.argv[2]):
    try:
        answers.append(client.call(kind, **fields))
    except GPUPoolError as error:
        answers.append({"code": error.code})
print(json.dumps(answers))
client.close()
"""


def as_nobody(path, *calls):
    """Return the broker's answers to another user."""
    done = subprocess.run(
        [sys.executable, "-c", SPY, str(path), json.dumps(calls)],
        capture_output=True, text=True, timeout=60, cwd=kit.ROOT,
        env={**os.environ, "PYTHONPATH": kit.PYTHONPATH},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def machine_wide(make_broker):
    """A broker for all users, as systemd starts it."""
    folder = Path("/run") / f"gpb-{os.getpid()}"
    broker = make_broker()
    broker.socket = folder / "broker.sock"
    try:
        yield broker.started
        broker.close()
    finally:
        kit.remove(folder)


@root_only
def test_other_users_see_only_sizes_states_and_places(machine_wide):
    mine = Kernel(machine_wide, "my secret label")
    try:
        mine.attach()
        status, journal, release, keep, request, close, hello = as_nobody(
            machine_wide.socket,
            ("status", {}),
            ("journal", {"limit": 10000}),
            ("release", {"session": mine.session}),
            ("keep", {"session": mine.session, "seconds": 1}),
            ("request", {"session": mine.session, "memory": 1 << 20}),
            ("close", {"session": mine.session}),
            ("hello", {"session": mine.session, "token": mine.token}),
        )
        (seen,) = status["sessions"]
        assert seen["owner"] == "other"
        assert set(seen) == {
            "id", "owner", "state", "priority", "granted_bytes", "device", "devices", "slices",
            "queue_position", "asks", "waits_for", "queued_at",
        }  # fmt: skip
        assert "secret" not in str(status)
        assert "secret" not in str(journal)
        assert journal["rows"] == []
        assert [a["code"] for a in (release, keep, request, close)] == ["not-allowed"] * 4
        assert hello["code"] == "not-yours"
        assert mine.state() == "active"
        (whole,) = machine_wide.status()["sessions"]
        assert whole["label"] == "my secret label"
    finally:
        mine.close()


@root_only
def test_admin_sees_and_releases_everything(make_broker):
    folder = Path("/run") / f"gpb-{os.getpid()}"
    broker = make_broker(admins=["nobody"])
    broker.socket = folder / "broker.sock"
    broker.start()
    mine = Kernel(broker, "label")
    try:
        mine.attach()
        mine.do("drop", hold="cell")
        status, release = as_nobody(
            broker.socket, ("status", {}), ("release", {"session": mine.session})
        )
        assert status["sessions"][0]["label"] == "label"
        assert release["note"]
        mine.wait_state("detached")
    finally:
        mine.close()
        broker.close()
        kit.remove(folder)


@root_only
def test_only_admins_see_rows_without_an_owner(machine_wide):
    refused = {"kernel_id": "k", "request": {"memory": 1 << 50}}
    with machine_wide.client() as client, pytest.raises(GPUPoolError):
        client.call("open", **refused)
    again, theirs = as_nobody(machine_wide.socket, ("open", refused), ("journal", {}))
    assert again["code"] == "over-device"
    assert {(row["kind"], row["owner"]) for row in theirs["rows"]} == {("refuse", "nobody")}
    with machine_wide.client() as client:
        rows = client.call("journal")["rows"]
    assert {row["owner"] for row in rows if row["kind"] == "refuse"} == {"root", "nobody"}
    assert {row["owner"] for row in rows if row["kind"] in ("broker-start", "device-seen")} == {""}


EMULATED = """
import ctypes, json, os, sys
from jupyter_gpupool.client import Client
cuda = ctypes.CDLL(sys.argv[2])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
client = Client(sys.argv[1])
opened = client.call("open", kernel_id="k", attach="cell")
os.environ.update({k: v for k, v in opened["env"].items() if not k.startswith("LD_")})
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
print(cuda.cuInit(0), flush=True)
print(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), flush=True)
print(cuda.cuCtxSetCurrent(context), flush=True)
print(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(64 << 20)), flush=True)
client.call("launched", session=opened["session"], pid=os.getpid())
print("launched", flush=True)
sys.stdin.read()
"""


@root_only
def test_emulated_devices_of_the_machine_serve_every_user(machine_wide):
    state = machine_wide.socket.with_name("broker.sock.emulated")
    assert state.stat().st_mode & 0o777 == 0o711
    program = subprocess.Popen(
        [sys.executable, "-c", EMULATED, str(machine_wide.socket),
         str(library_dir() / "libcuda.so.1")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=kit.ROOT,
        env={**os.environ, "PYTHONPATH": kit.PYTHONPATH},
    )  # fmt: skip
    try:
        said = [program.stdout.readline().strip() for _ in range(5)]
        assert said == ["0", "0", "0", "0", "launched"]
        wait_until(
            lambda: (
                sum(d["memory_used"] or 0 for d in machine_wide.status()["devices"]) >= 64 << 20
            ),
            "NVML shows its memory",
        )
        made = as_nobody(machine_wide.socket, ("ping", {}))
        assert made[0]["type"] == "ok"
    finally:
        program.kill()
        program.wait(60)
        program.stdin.close()
        program.stdout.close()


@root_only
def test_owner_of_a_session_is_the_user_who_opened_it(machine_wide):
    opened, status = as_nobody(
        machine_wide.socket, ("open", {"kernel_id": "k", "label": "theirs"}), ("status", {})
    )
    assert opened["session"]
    (seen,) = status["sessions"]
    assert seen["owner"] == "nobody"
    wait_until(lambda: not machine_wide.status()["sessions"], "its end with the connection")


@root_only
def test_other_users_cannot_connect_to_a_users_own_broker(broker):
    with pytest.raises(AssertionError, match="BrokerUnavailable"):
        as_nobody(broker.socket, ("ping", {}))


def test_client_refuses_a_socket_that_is_a_link(folder):
    (folder / "link").symlink_to("/run/other.sock")
    with pytest.raises(GPUPoolError) as caught:
        Client(folder / "link")
    assert caught.value.code == "bad-socket"


def test_invalid_text_does_not_stop_the_journal(broker, kernel):
    """JSON may contain half a surrogate pair. UTF-8 cannot encode it, so SQLite refuses it."""
    half = "\ud800"
    with Raw(broker.socket) as raw:
        raw.say(type="open", id=1, kernel_id=half, label=half + "\0\n\x1b[31m")
        opened = raw.read()
        raw.say(type="journal", id=2, session=half, after=2**62, limit=2**62)
        assert raw.read()["rows"] == []
        raw.say(type="close", id=3, session=opened["session"], reason=half * 10)
        assert raw.read()["type"] == "ok"
    one = kernel("one")
    one.attach()
    assert broker.rows("close")[0]["reason"] == "?" * 10
    assert broker.rows("attach")
    assert broker.status()["broker"]["journal_problem"] == ""


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), -1, 1e300], ids=str)
def test_keep_request_with_an_invalid_time_is_refused(broker, kernel, seconds):
    one = kernel("one", agent=False)
    assert refusal(one.server, "keep", session=one.session, seconds=seconds) == "bad-request"
