# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Kernels on another machine, with two real brokers, agents and MUNGE daemons, and real users."""

from __future__ import annotations

import json
import os
import pwd
import signal
import socket
import subprocess
import sys

import pytest

from jupyter_gpupool.cluster.kernel_host import (
    PORTS,
    KernelFiles,
    command_of,
    give_up_protection,
    kernelspec,
)
from jupyter_gpupool.errors import Code, RefusedError
from tests.broker.kit import remove, short_folder, wait_until
from tests.server.kit import USE_GPU
from tests.server.kit import Server as JupyterServer

from .kit import is_alive
from .remotes import (
    ROOTS,
    USER,
    USERS,
    Pair,
    RemoteKernel,
    User,
    a_server,
    identified,
    write_remote_kernelspec,
)


@pytest.fixture(scope="module")
def cluster():
    with identified(Pair) as found:
        found.wait_serving()
        yield found


@pytest.fixture
def user(cluster):
    found = User(cluster)
    yield found
    found.close()


def test_a_kernel_starts_on_the_other_machine_as_its_user(cluster, user):
    kernel = RemoteKernel(user)
    try:
        assert "pid" in kernel.answer, kernel.answer
        client = kernel.connect()
        asked = (
            "import os, sys; print(os.getuid(), os.getcwd(), os.getppid(), 'ray' in sys.modules)"
        )
        uid, folder, parent, ray = kernel.run(asked).split()
        assert (uid, folder, ray) == (str(USER), "/", "False")
        assert int(parent) == cluster.brokers["m1"].process.pid
        (seen,) = cluster.brokers["m1"].status()["sessions"]
        assert (seen["owner"], seen["label"]) == (pwd.getpwuid(USER).pw_name, "theirs.ipynb")
        assert seen["request"]["memory"] == 200 << 20
        assert cluster.brokers["m0"].status()["sessions"] == []
        # %gpu asks the broker of the kernel's own machine.
        assert "200 MiB" in kernel.run("%gpu 200MiB\n%gpu")
        # A signal must reach the kernel. So the kernel must not inherit the signals that the broker
        # blocks or ignores.
        message = client.execute("import time; print('on', flush=True); time.sleep(600)")
        while client.get_iopub_msg(timeout=60)["msg_type"] != "stream":
            pass
        assert kernel.order("signal", signal=2) == {"running": True}
        while (reply := client.get_shell_msg(timeout=60))["parent_header"]["msg_id"] != message:
            pass
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        kernel.run("os.write(2, b'a line of the log')")
        assert "a line of the log" in kernel.order("log")["log"]
        # A second start of the same kernel is refused.
        assert RemoteKernel(user, kernel_id=kernel.id).answer["code"] == "duplicate"
        # The kernel accepts no client without its keys.
        keys = {name: kernel.secrets[name].encode() for name in kernel.secrets if "curve" in name}
        assert kernel.lets_in(**keys, curve_serverkey=keys["curve_publickey"])
        assert not kernel.lets_in()
    finally:
        kernel.end()
    assert kernel.order("poll") == {"running": False, "code": -9}


def test_a_restarted_broker_knows_its_kernels(cluster, user):
    kernel = RemoteKernel(user)
    try:
        pid = kernel.answer["pid"]
        cluster.brokers["m1"].kill()
        assert is_alive(pid), "a kernel needs no broker"
        assert cluster.brokers["m1"].started
        wait_until(
            lambda: kernel.order("poll") == {"running": True, "code": None}, "the broker to answer"
        )
    finally:
        kernel.end()


def test_why_considers_the_model_and_the_folders_of_a_kernel(cluster, user):
    data = ["/srv/data/images", "/home/x"]
    options = {"memory": "200MiB", "model": "No Such GPU", "data": data}
    kernel = RemoteKernel(user, options=options)
    try:
        for _ in range(2):
            with cluster.brokers["m1"].client() as client:
                (seen,) = client.call("status")["sessions"]
                wait_until(lambda: client.call("cluster")["view"], "the ledger to answer")
                ((name, text),) = client.call("elsewhere", session=seen["id"])["considered"]
            assert name == "m0"
            assert text.startswith(
                "no, the kernel needs the model No Such GPU, and the machine has only "
            )
            assert text.endswith("; /srv/data/images is on a disk there")
            # The next broker must read the model and the folders from the journal.
            cluster.brokers["m1"].kill()
            assert cluster.brokers["m1"].started
    finally:
        kernel.end()


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"kernel": "no-such"}, "not-there", "On m1, there is no kernelspec 'no-such'"),
        ({"kernel": "../../x"}, "not-there", "On m1, there is no kernelspec"),
        ({"cwd": "/no/such"}, "not-there", "On m1, the folder /no/such cannot be entered"),
        ({"cwd": "here"}, "not-there", "On m1, the path of the working folder is not absolute"),
        ({"kernel_id": "../x"}, "bad-request", "The kernel id in this order is not valid"),
        ({"options": {"memory": "900GiB"}}, "over-device", "900 GiB"),
        ({"secrets": {}}, "bad-request", "The kernel could not be prepared"),
        ({"ports": {"shell_port": 70_000}}, "bad-request", "OverflowError"),
        ({"ports": [1]}, "bad-request", "AttributeError"),
    ],
)
def test_the_refusal_names_what_the_machine_lacks(user, change, code, words):
    answer = RemoteKernel(user, **change).answer
    assert answer["code"] == code, answer
    assert words in answer["message"]


@pytest.mark.parametrize("supported", [None, [], ["tls"], "none"])
def test_a_kernel_that_does_not_declare_encryption_is_refused(tmp_path, monkeypatch, supported):
    folder = tmp_path / "kernels" / "plain"
    folder.mkdir(parents=True)
    spec = {"argv": ["python"], "metadata": {"supported_encryption": supported}}
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    with pytest.raises(RefusedError, match="'plain' on m1 does not say") as error:
        kernelspec({"kernel": "plain"}, "m1")
    assert error.value.code == "no-curve"


def test_the_program_of_a_kernel_must_exist():
    place = KernelFiles("k")
    spec = {"argv": ["sh", "{connection_file}"]}
    assert command_of(spec, place, "m1") == ["sh", str(place.connection_file)]
    for word in ("/no/such/python", "no-such-program"):
        with pytest.raises(RefusedError, match=f"On m1, there is no program {word}") as error:
            command_of({"argv": [word]}, place, "m1")
        assert error.value.code == "not-there"


#: Holds ports, and then becomes a program that binds them, as a kernel does.
BECOME = """
import json, os, sys
from jupyter_gpupool.cluster.kernel_host import hold_ports
ports = [*hold_ports("127.0.0.1", {}).values()]
print(json.dumps(ports), flush=True)
sys.stdin.readline()
bind = "import sys, zmq; s = [zmq.Context.instance().socket(zmq.ROUTER) for _ in sys.argv[1:]]"
bind += "; [a.bind(f'tcp://127.0.0.1:{p}') for a, p in zip(s, sys.argv[1:])]; print('bound')"
os.execv(sys.executable, [sys.executable, "-c", bind, *map(str, ports)])
"""


def test_nobody_else_gets_a_port_before_the_kernel_binds_it():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", BECOME], **pipes) as kernel:
        ports = json.loads(kernel.stdout.readline())
        assert len({*ports}) == len(PORTS)
        for port in ports:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
        assert kernel.communicate("go\n", timeout=60)[0] == "bound\n"


@pytest.mark.parametrize(("before", "after"), [("-500\n", "0"), ("300\n", "300\n")])
def test_a_kernel_loses_the_brokers_protection_from_oom(tmp_path, before, after):
    path = tmp_path / "oom_score_adj"
    path.write_text(before)
    give_up_protection(path)
    assert path.read_text() == after


@pytest.mark.skipif(not ROOTS, reason="only root can become other users")
def test_users_cannot_reach_each_others_kernels(cluster, user):
    other = User(cluster, USERS[1])
    kernel = RemoteKernel(user)
    try:
        pid = kernel.answer["pid"]
        for do, more in (("signal", {"signal": 9}), ("poll", {})):
            answer = other.order(do=do, kernel_id=kernel.id, **more)
            assert not answer["running"]
        assert other.order(do="log", kernel_id=kernel.id) == {"log": ""}
        assert is_alive(pid)
        assert kernel.order("poll")["running"]
    finally:
        kernel.end()
        other.close()


@pytest.mark.skipif(not ROOTS, reason="only root can become other users")
def test_root_gets_no_kernel_on_another_machine(cluster):
    root = User(cluster, 0)
    answer = RemoteKernel(root).answer
    root.close()
    assert answer["code"] == "not-allowed"
    assert "starts no kernel for user id 0" in answer["message"]


def test_a_credential_is_valid_once_and_on_its_machine_only(user):
    sealed = user.seal("m1", do="poll", kernel_id="k")
    assert user.call("order", node="m1", credential=sealed)["result"]["running"] is False
    again = user.call("order", node="m1", credential=sealed)
    assert again["code"] == "bad-credential"
    elsewhere = user.seal("m0", do="poll", kernel_id="k")
    found = user.call("order", node="m1", credential=elsewhere)
    assert "it is for the machine m0, but this machine is m1" in found["message"]
    here = user.seal("m0", do="poll", kernel_id="k")
    assert user.call("order", node="m0", credential=here)["result"]["running"] is False


def test_no_order_can_disconnect_the_agent_of_another_machine(cluster, user):
    # Each of these characters takes two bytes in this message. In the agents' messages, it would
    # take six.
    wide = {"v": 1, "type": "order", "id": 1, "node": "m1", "credential": "\xe9" * (1 << 16)}
    with socket.socket(socket.AF_UNIX) as link, link.makefile() as answers:
        link.connect(str(cluster.brokers["m0"].socket))
        link.sendall(json.dumps(wide, ensure_ascii=False).encode() + b"\n")
        assert json.loads(answers.readline())["code"] == "protocol"
    # Each of these characters takes two bytes in JSON.
    found = user.call("order", node="m1", credential='"' * (1 << 16))
    assert found["code"] == "bad-credential", found
    assert user.order(do="poll", kernel_id="k")["running"] is False


def test_a_user_cannot_act_for_the_agent(user):
    if not ROOTS:
        pytest.skip("the broker's own user may")
    sealed = user.seal("m0", do="poll", kernel_id="k")
    calls = (
        ("orders", {}), ("perform", {"credential": sealed}),
        ("performed", {"name": "x", "result": "{}"}),
    )  # fmt: skip
    for kind, fields in calls:
        assert user.call(kind, **fields)["code"] == "not-allowed", kind


def test_no_machine_is_reachable_without_the_local_agent(cluster, user):
    cluster.agents["m0"].kill()
    try:
        found = {}

        def refused():
            found.update(user.order(do="poll", kernel_id="k"))
            return found.get("code") == "unreachable"

        wait_until(refused, "the broker to notice")
        assert "m1 does not answer" in found["message"]
    finally:
        cluster.agents["m0"].start()
        wait_until(lambda: "running" in user.order(do="poll", kernel_id="k"), "the agent")


def test_a_machine_with_a_silent_agent_is_unreachable_at_once(cluster, user):
    cluster.agents["m1"].kill()
    try:
        nodes = lambda: {n["name"]: n["state"] for n in cluster.order()["nodes"]}  # noqa: E731
        wait_until(lambda: nodes()["m1"] == "silent", "the ledger to notice")
        found = user.order(do="poll", kernel_id="k")
        # A lost order would get another answer, and only after a minute.
        assert found["code"] == "unreachable", found
        assert "m1 does not answer: its agent last reported " in found["message"]
    finally:
        cluster.agents["m1"].start()
        wait_until(lambda: "running" in user.order(do="poll", kernel_id="k"), "the agent")


def test_a_kernel_too_large_for_every_machine_is_refused(user):
    found = user.call("place", memory=1 << 40)
    assert found["code"] == "no-machine"
    assert "m0: the kernel needs 1 TiB on a GPU" in found["message"]


# ---------------------------------------------------------------------- as a Jupyter server


@pytest.fixture
def server(cluster):
    with a_server(cluster) as found:
        yield found


def test_a_server_uses_a_kernel_on_another_machine(cluster, server):
    name, words = server.do("refused", 900 << 30)
    assert name == "KernelNotStarted"
    assert "No machine of the cluster can take this kernel" in words
    assert server.do("start") == "m1"
    asked = "import os; x = 1; print(os.getuid(), os.getpid())"
    uid, pid = server.do("run", asked).split()
    assert uid == str(USER)
    assert server.do("interrupt") == "KeyboardInterrupt"
    assert server.do("run", "print(x)") == "1"
    assert server.do("takes_over") is True
    # A restarted kernel keeps its machine and its connection, but has another process.
    assert server.do("restart") == "m1"
    assert server.do("run", "print(x)") == "NameError"
    again = server.do("run", asked).split()[1]
    assert again != pid
    assert not is_alive(int(pid))
    # A kernel on a silent machine does not count as dead.
    cluster.agents["m0"].kill()
    assert server.do("alive") is True
    cluster.agents["m0"].start()
    # A kernel whose process has ended counts as dead.
    os.kill(int(again), 9)
    assert server.do("died") == -9
    assert server.do("alive") is False
    assert server.do("restart") == "m1"
    assert server.do("shutdown") is False
    wait_until(lambda: not cluster.brokers["m1"].status()["sessions"], "the end of its session")


@pytest.fixture
def jupyter_server(cluster, server):
    """The user's Jupyter server on m0. Its Pooled GPU kernels start on other machines."""
    folder = short_folder()
    write_remote_kernelspec(folder / "data", memory="200MiB")
    found = JupyterServer(folder, cluster.brokers["m0"].socket, user=USER if ROOTS else None)
    yield found
    found.end()
    print(found.tail())
    remove(folder)


def test_a_jupyter_server_shows_and_controls_a_remote_kernel(cluster, jupyter_server):
    kernel = jupyter_server.start_kernel()
    path = f"/sessions/{kernel}"

    def rows():
        return [s for s in jupyter_server.api("/pool")["sessions"] if s.get("kernel_id") == kernel]

    def until(what, condition):
        return wait_until(lambda: next(filter(condition, rows()), None), what)

    def theirs():
        (found,) = cluster.brokers["m1"].status()["sessions"]
        return found

    row = until("its session", lambda s: s["state"] == "detached")
    assert jupyter_server.api("/pool")["remote_kernels"] == {kernel: "m1"}
    assert (row["machine"], row["unreachable"], row["here"], row["mine"]) == ("m1", "", True, True)
    assert row["id"] == theirs()["id"]
    # Here both machines use the same clock.
    assert abs(row["opened_at"] - theirs()["opened_at"]) < 1
    jupyter_server.cells(kernel).run(USE_GPU)
    row = until("its slice", lambda s: s["granted_bytes"] == 200 << 20)
    assert [gpu["uuid"] for gpu in row["gpus"]] == theirs()["devices"] == row["devices"]

    assert jupyter_server.api(f"{path}/keep", "POST", seconds=600)["note"]
    kept = theirs()["keep_until"]
    row = until("the end of its time", lambda s: s["keep_until"] is not None)
    assert abs(row["keep_until"] - kept) < 1
    assert jupyter_server.api(path, "PATCH", memory="220MiB")["request"]["memory"] == 220 << 20
    until("its new request", lambda s: s["request"]["memory"] == theirs()["request"]["memory"])
    refused = jupyter_server.api(path, "PATCH", 409, memory="900GiB")
    assert "900 GiB" in refused["message"]
    assert jupyter_server.api(f"{path}/why")["lines"]
    jupyter_server.api(f"{path}/keep", "POST", seconds=0)
    jupyter_server.api(f"{path}/release", "POST")
    row = until("its release", lambda s: s["state"] == "detached")
    assert row["suspended_bytes"] == theirs()["suspended_bytes"] >= 64 << 20

    # The Jupyter server still shows the session on a silent machine, and names the machine.
    cluster.agents["m1"].kill()
    row = until("m1 to be silent", lambda s: s["unreachable"])
    assert row["unreachable"].startswith("m1 ")
    assert row["suspended_bytes"] >= 64 << 20
    silent = Code.UNREACHABLE
    assert jupyter_server.api(f"{path}/release", "POST", silent.status)["code"] == silent
    cluster.agents["m1"].start()
    until("m1 to answer", lambda s: not s["unreachable"])

    # Stop the kernel and kill the agent of m1, as if the whole machine hung. The server can then
    # neither end the kernel nor wait for its end. A new kernel starts on another machine.
    pid = theirs()["pid"]
    os.kill(pid, signal.SIGSTOP)
    cluster.agents["m1"].kill()
    until("m1 to be silent", lambda s: s["unreachable"])
    other = jupyter_server.start_kernel()
    assert jupyter_server.api("/pool")["remote_kernels"] == {kernel: "m1", other: "m0"}
    jupyter_server.stop_kernel(kernel)
    assert is_alive(pid)
    assert "the kernel on m1 may still run" in jupyter_server.log.read_text()
    wait_until(lambda: not rows(), "the end of its session here")
    jupyter_server.stop_kernel(other)
    assert jupyter_server.api("/pool")["remote_kernels"] == {}
    os.kill(pid, 9)
    cluster.agents["m1"].start()
    wait_until(lambda: not cluster.brokers["m1"].status()["sessions"], "its end")
