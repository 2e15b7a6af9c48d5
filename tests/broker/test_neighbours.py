# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Attacks on a real broker: what a hostile user may cost the broker and other users.

These tests check bounds; the benchmark ``neighbours`` measures how long other users wait. If the
tests run as root, each attack runs as another user. Otherwise it runs as the tests' own user. The
bounds are the same in both cases.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from benchmarks import attack
from jupyter_gpupool.broker.request_fields import REQUESTS
from jupyter_gpupool.broker.sessions import MAX_EARLY
from jupyter_gpupool.broker.transport import listener
from jupyter_gpupool.client import Client
from jupyter_gpupool.errors import RefusedError
from jupyter_gpupool.starting import answers

from . import kit
from .kit import ROOT, Raw, wait_until

#: A user id that no account has.
MALLORY = 21003

#: Limit of the broker's resident memory under any attack, in bytes.
MOST = 100_000_000

#: Most bytes that an attack of a few seconds may add to the log.
MOST_LOG = 50_000

ATTACK = ROOT / "benchmarks" / "attack.py"


@pytest.fixture(scope="module")
def attacked():
    """A broker to attack; it serves the whole machine if the tests run as root."""
    folder = kit.short_folder()
    folder.chmod(0o755)
    broker = kit.Broker(folder, max_sessions_per_user=40, default_memory=64 << 20)
    if os.geteuid() == 0:
        broker.socket = Path("/run") / folder.name / "broker.sock"  # root's broker serves all users
    try:
        assert broker.start()["ok"]
        yield broker
    finally:
        broker.close()
        print(broker.tail())
        kit.remove(folder)
        if os.geteuid() == 0:
            kit.remove(broker.socket.parent)


def start(broker, kind, seconds):
    """Begin an attack, as another user if possible."""
    command = [sys.executable, str(ATTACK), str(broker.socket), kind, str(seconds)]
    setpriv = shutil.which("setpriv")
    if os.geteuid() == 0 and setpriv:
        who = [f"--reuid={MALLORY}", f"--regid={MALLORY}", "--clear-groups"]
        may = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        command = [setpriv, *who, *may, *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def resident(broker):
    text = Path(f"/proc/{broker.process.pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) * 1024


def descriptors(broker):
    return len([*Path(f"/proc/{broker.process.pid}/fd").iterdir()])


def calm(broker):
    """Return whether the attack's connections are closed: the broker then has few descriptors."""
    return descriptors(broker) < 60


@pytest.mark.parametrize("kind", sorted(attack.KINDS))
def test_attack_is_bounded_and_leaves_nothing_behind(attacked, kind):
    log = attacked.log.stat().st_size
    quiet = resident(attacked)
    process = start(attacked, kind, 1.2)
    most = quiet
    try:
        while process.poll() is None:
            most = max(most, resident(attacked))
            time.sleep(0.02)
    finally:
        process.kill()
        told, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    seen = json.loads(told.splitlines()[-1])
    assert most < MOST, seen
    assert "internal" not in seen["codes"], attacked.tail()
    assert attacked.log.stat().st_size - log < MOST_LOG
    assert "Traceback" not in attacked.log.read_text()
    # The broker still answers, and has freed the descriptors and the memory that the attack used.
    wait_until(lambda: attacked.status()["pid"] == attacked.process.pid, "the broker", 60)
    wait_until(lambda: calm(attacked), "the attack's connections are closed", 60)
    assert resident(attacked) < quiet + 20_000_000


def test_others_are_served_during_a_flood_of_connections(attacked):
    """The backlog once became full, and 36 of 57 clients were refused immediately."""
    process = start(attacked, "churn", 2)
    try:
        for _ in range(30):
            with Client(attacked.socket) as client:
                client.call("ping", timeout=60)
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_backlog_has_its_configured_length(folder):
    """asyncio's own server would call listen(100), and replace the backlog's configured length."""
    broker = kit.Broker(folder).started
    waiting = []
    try:
        os.kill(broker.process.pid, 19)  # SIGSTOP: the broker accepts no connection
        for _ in range(listener.LOBBY + 200):
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].setblocking(False)
            waiting[-1].connect(str(broker.socket))
    finally:
        os.kill(broker.process.pid, 18)
        for one in waiting:
            one.close()
        broker.close()


def test_clients_wait_for_a_stopped_broker(folder):
    """A class of 200 opens its notebooks while the broker is stopped for a second."""
    broker = kit.Broker(folder).started
    done, failed = [], []

    def ask():
        try:
            with Client(broker.socket) as client:
                client.call("ping", timeout=60)
            done.append(1)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(200)]
    try:
        os.kill(broker.process.pid, 19)
        for thread in threads:
            thread.start()
        time.sleep(1)
        os.kill(broker.process.pid, 18)
        for thread in threads:
            thread.join(60)
        assert len(done) == 200, failed[:3]
    finally:
        os.kill(broker.process.pid, 18)
        broker.close()


def test_broker_with_few_descriptors_keeps_some_for_itself(folder):
    """The broker refuses connections, and says why, before it runs out of descriptors."""
    broker = kit.Broker(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 128
    resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE, (few, hard))
    # The broker raises its soft limit to the hard limit, so the starter sets both limits.
    starter = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({few}, {few})); "
    starter += "import sys; from jupyter_gpupool.broker.app import main; sys.exit(main())"
    try:
        resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE, (soft, hard))
        command = [sys.executable, "-c", starter, "--socket", str(broker.socket)]
        command += ["--config", str(broker.config_file)]
        with broker.log.open("ab") as log:
            broker.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=kit.environment(folder), cwd=ROOT
            )
        wait_until(lambda: answers(broker.socket), "the broker", 60)
        held, refused = [], []
        for _ in range(few):
            raw = Raw(broker.socket)
            with suppress(BrokenPipeError):  # refused and already closed
                raw.say(type="ping", id=1)
            answer = raw.read()
            (held if answer["type"] == "ok" else refused).append(raw)
        assert held
        assert refused
        for raw in (*held, *refused):
            raw.close()
        wait_until(lambda: broker.status()["pid"] == broker.process.pid, "the broker", 60)
        assert broker.log.stat().st_size < MOST_LOG
    finally:
        broker.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_status_omits_other_users_sessions_without_a_kernel(attacked):
    """A flood of ``open`` used to make every status longer for every user."""
    with attacked.client() as server:
        opened = [server.call("open", kernel_id=f"k{n}")["session"] for n in range(20)]
        os.seteuid(MALLORY)
        try:
            with attacked.client() as client:
                seen = client.call("status")["sessions"]
                with pytest.raises(RefusedError, match="belongs to another user"):
                    client.call("why", session=opened[0])
        finally:
            os.seteuid(0)
        assert not {s["id"] for s in seen} & {*opened}
        assert {*opened} <= {s["id"] for s in attacked.status()["sessions"]}, "an admin sees them"
        for name in opened:
            server.call("close", session=name)


# --------------------------------------------------------------------------- limits


def test_sessions_of_one_user_are_bounded(make_broker):
    broker = make_broker(max_sessions_per_user=2).started
    with broker.client() as client:
        first = client.call("open", kernel_id="a")
        client.call("open", kernel_id="b")
        with pytest.raises(RefusedError, match="2 sessions") as caught:
            client.call("open", kernel_id="c")
        assert caught.value.code == "too-many"
        assert "max_sessions_per_user" in caught.value.message
        client.call("close", session=first["session"])
        client.call("open", kernel_id="c")


def test_messages_before_the_launch_are_bounded_and_answered(broker):
    with broker.client() as server:
        opened = server.call("open", kernel_id="k")
        who = {"session": opened["session"], "token": opened["token"]}
        early = [Raw(broker.socket) for _ in range(MAX_EARLY + 1)]
        try:
            for number, raw in enumerate(early[:-1]):
                raw.say(type="hello", id=number + 1, **who)
                raw.say(type="ping", id=1000)
                assert raw.read()["id"] == 1000  # the ping is answered, the hello waits
            early[0].say(type="hello", id=50, **who)
            assert early[0].read()["code"] == "duplicate"
            early[-1].say(type="hello", id=1, **who)
            assert early[-1].read()["code"] == "not-launched"
            # A closed connection makes room.
            early[1].close()
            wait_until(lambda: descriptors(broker), "the broker")

            def accepted():
                early[-1].say(type="hello", id=2, **who)
                early[-1].say(type="ping", id=3)
                return early[-1].read()["id"] == 3

            wait_until(accepted, "the place of the one that left")
            server.call("close", session=opened["session"])
            assert early[0].read()["code"] == "unknown-session"
        finally:
            for raw in early:
                raw.close()


# --------------------------------------------------------------------------- any input

#: Values of the expected types and of wrong types.
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**25), 10**25),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["device", "cell", "manual", "lazy", "pause", "begin", "\ud800", "x" * 5000]),
    st.lists(st.one_of(st.none(), st.text(max_size=3), st.dictionaries(st.text(), st.none()))),
    st.dictionaries(
        st.sampled_from(["memory", "limit", "devices", "compute", "priority", "id", "kind"]),
        st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=5)),
        max_size=4,
    ),
)


@st.composite
def requests(draw):
    """A request of a known type with arbitrary values, many of them valid."""
    kind = draw(st.sampled_from(sorted(REQUESTS)))
    required, optional = REQUESTS[kind]
    message = {"type": kind, "id": draw(st.integers(1, 99))}
    for name in (*required, *optional):
        if name in required or draw(st.booleans()):
            message[name] = (
                draw(VALUES) if draw(st.booleans()) else draw(st.sampled_from(["SESSION", 0, 1]))
            )
    if "session" in required and draw(st.booleans()):
        message["session"] = "SESSION"
    if "token" in required and draw(st.booleans()):
        message["token"] = "TOKEN"
    return message


@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)
@given(st.lists(requests(), min_size=1, max_size=12))
def test_no_input_causes_an_internal_error(attacked, messages):
    """A session is open. The broker gets the requests in any order, with any values.

    An integer of 400 digits once caused an internal error.
    """
    with (
        subprocess.Popen(["sleep", "600"], start_new_session=True) as kernel,
        attacked.client() as server,
        Raw(attacked.socket) as raw,
    ):
        opened = server.call("open", kernel_id="k")
        names = {"SESSION": opened["session"], "TOKEN": opened["token"]}
        # The kernel is a separate process, because one of the requests ends the kernel.
        server.call("launched", session=opened["session"], pid=kernel.pid)
        # After too many invalid requests, the broker may close the connection instead of answering.
        with suppress(OSError):
            raw.say(type="hello", id=3, **{k.lower(): v for k, v in names.items()})
            for message in messages:
                raw.say(
                    **{k: names.get(v, v) if isinstance(v, str) else v for k, v in message.items()}
                )
            raw.say(type="ping", id=100)
            raw.socket.shutdown(socket.SHUT_WR)
        answers = raw.read_all()
        server.call("close", session=opened["session"])
        kernel.kill()
    assert answers
    assert "internal" not in {a.get("code") for a in answers}, attacked.tail()
    assert "Traceback" not in attacked.log.read_text()
