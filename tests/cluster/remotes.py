# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Users, servers and kernels of a cluster in which machines start kernels for each other."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty

import zmq
from jupyter_client.blocking import BlockingKernelClient
from zmq.utils.monitor import recv_monitor_message

from tests.broker.kit import PYTHONPATH, ROOT, Broker, remove, short_folder, wait_until
from tests.users import as_user

from .identities import NOBODY, munge_daemons
from .kit import Cluster

ROOTS = os.geteuid() == 0
#: The user ids for the kernels. Only root can run kernels of two users.
USERS = (NOBODY, pwd.getpwnam("daemon").pw_uid) if ROOTS else (os.geteuid(),)
USER = USERS[0]

#: A kernelspec that every environment of this repository has.
KERNEL = "gpupool-python3"


class HostingBroker(Broker):
    """A broker that starts kernels for servers on other machines."""

    module = "tests.cluster.hosting_broker"


class Pair(Cluster):
    """Two machines, each with a MUNGE daemon. The user's server is on m0."""

    names = ("m0", "m1")
    make_broker = HostingBroker


def write_remote_kernelspec(data, **config):
    """Write a kernelspec like :data:`KERNEL` into ``data``, a user's Jupyter folder.

    The cluster chooses the machine for each kernel of this kernelspec.
    """
    installed = Path(sys.prefix) / "share/jupyter/kernels" / KERNEL / "kernel.json"
    spec = json.loads(installed.read_text())
    spec["metadata"]["kernel_provisioner"] = {
        "provisioner_name": "gpupool-remote-provisioner", "config": config,
    }  # fmt: skip
    folder = data / "kernels" / KERNEL
    folder.mkdir(parents=True)
    (folder / "kernel.json").write_text(json.dumps(spec))


@contextmanager
def identified(make, addresses=None):
    """Run a cluster of the class ``make``, with a MUNGE daemon for each machine.

    ``addresses`` maps a machine to its address; a machine without an entry has 127.0.0.1.
    """
    with munge_daemons(*make.names) as daemons:
        folder = short_folder()
        sockets = Path("/run") / folder.name if ROOTS else folder
        found = make(
            folder, sockets=sockets,
            of_node={
                n: {
                    "cluster_identity": f"munge:{path}",
                    "cluster_address": (addresses or {}).get(n, "127.0.0.1"),
                }
                for n, path in daemons.items()
            },
            cluster_min_uid=1, quotas={"*": {"leases": 2}},
            cluster_data=["/srv/data"],
        )  # fmt: skip
        found.daemons = daemons
        try:
            yield found.start()
        finally:
            found.close()
            print(found.logs())
            remove(folder)
            remove(sockets)


def running_as(uid):
    """Return the prefix that makes a command run as this user."""
    return as_user(uid) if ROOTS and uid else []


class User:
    """A user of m0."""

    def __init__(self, cluster, uid=USER):
        self.cluster, self.uid = cluster, uid
        with cluster.at("m0"):
            self.process = subprocess.Popen(
                [*running_as(uid), sys.executable, "-m", "tests.cluster.remote_user",
                 str(cluster.brokers["m0"].socket)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": PYTHONPATH},
            )  # fmt: skip

    def call(self, kind, **fields):
        self.process.stdin.write(json.dumps([kind, fields]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def seal(self, node, **order):
        identity = "munge:" + self.cluster.daemons["m0"]
        found = self.call("seal", identity=identity, reader=os.geteuid(), node=node, order=order)
        return found["credential"]

    def order(self, node="m1", **order):
        found = self.call("order", node=node, credential=self.seal(node, **order))
        return found.get("result", found)

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)


def shown(content):
    """Return the text of an output, or an empty text for standard error."""
    if content.get("name") == "stderr":
        return ""
    return content.get("text") or content.get("data", {}).get("text/plain", "")


class RemoteKernel:
    """A kernel on m1 for a user of m0."""

    def __init__(self, user, **order):
        public, secret = zmq.curve_keypair()
        self.user, self.id = user, str(uuid.uuid4())
        self.secrets = {
            "key": uuid.uuid4().hex, "signature_scheme": "hmac-sha256",
            "curve_publickey": public.decode(), "curve_secretkey": secret.decode(),
        }  # fmt: skip
        self.client = None
        self.answer = user.order(**{
            "do": "start", "kernel": KERNEL, "kernel_id": self.id, "cwd": "/",
            "secrets": self.secrets, "label": "theirs.ipynb", "options": {"memory": "200MiB"},
            **order,
        })  # fmt: skip

    def lets_in(self, **keys):
        """Return whether the kernel accepts a client that has these keys."""
        ends = {zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED,
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                zmq.EVENT_HANDSHAKE_FAILED_AUTH}  # fmt: skip
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.linger = 0
            for name, key in keys.items():
                setattr(client, name, key)
            with client.get_monitor_socket() as monitor:
                client.connect(f"tcp://{self.answer['ip']}:{self.answer['shell_port']}")
                while monitor.poll(60_000):
                    event = recv_monitor_message(monitor)["event"]
                    if event in ends:
                        return event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        raise AssertionError("the kernel neither answers nor refuses")

    def connect(self):
        kept = {k: v for k, v in self.answer.items() if k == "ip" or k.endswith("_port")}
        self.client = BlockingKernelClient()
        self.client.load_connection_info({"transport": "tcp", **kept, **self.secrets})
        self.client.start_channels()
        # Do not call the client's ``wait_for_ready``. On a busy machine, it may miss a heartbeat
        # and report a dead kernel.
        wait_until(self._hears, "the kernel to be heard")
        return self.client

    def _hears(self):
        self.client.kernel_info(reply=True, timeout=60)
        with suppress(Empty):
            return self.client.get_iopub_msg(timeout=1)

    def run(self, code):
        """Run a cell; return its output, or the name of its error."""
        said = []
        found = {"content": {"status": "aborted"}}
        # After an error in a cell, ipykernel aborts all requests until its queue is empty. So send
        # the request again.
        while found["content"]["status"] == "aborted":
            found = self.client.execute_interactive(
                code, timeout=60, output_hook=lambda m: said.append(shown(m["content"]))
            )
        return found["content"].get("ename") or "".join(said).strip()

    def order(self, do, **fields):
        return self.user.order(do=do, kernel_id=self.id, **fields)

    def end(self):
        if self.client is not None:
            self.client.stop_channels()
        self.order("signal", signal=9)
        wait_until(lambda: not self.order("poll")["running"], "the end of the kernel")
        self.order("clean")


@contextmanager
def a_server(cluster):
    """Yield a :class:`Server` on m0, whose GPU has less room than the other machines' GPUs."""
    kept = cluster.kernel("m0")
    kept.attach()
    home = short_folder()
    found = Server(cluster, home)
    yield found
    found.close()
    remove(home)
    print(found.log.read_text())
    kept.close()


class Server:
    """A user's kernel manager on m0, with the provisioner for remote kernels."""

    def __init__(self, cluster, folder):
        self.log = cluster.folder / "manager.log"
        os.chown(folder, USER, -1)
        with self.log.open("wb") as log, cluster.at("m0"):
            self.process = subprocess.Popen(
                [*running_as(USER), sys.executable, "-m", "tests.cluster.remote_manager",
                 str(cluster.brokers["m0"].socket), str(folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": PYTHONPATH},
            )  # fmt: skip

    def do(self, step, *arguments):
        self.process.stdin.write(json.dumps([step, *arguments]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-4000:]
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)
