# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A program that sends orders to the broker, in place of a user's server on another machine.

A user of this machine runs the program. Each line of its input is an order, or a cell for the
kernel that the program has started. For each line, the program prints one line of JSON.
"""

import json
import sys
import uuid

import zmq
from jupyter_client.blocking import BlockingKernelClient

from jupyter_gpupool.client import Client
from jupyter_gpupool.cluster.authenticators import authenticator
from jupyter_gpupool.cluster.identity import order_text
from jupyter_gpupool.endpoint import MACHINE_SOCKET
from jupyter_gpupool.errors import GPUPoolError

NODE, KERNEL = "solo", str(uuid.uuid4())


def send(order):
    text = order_text(NODE, {**order, "kernel_id": KERNEL})
    with Client(MACHINE_SOCKET) as client:
        credential = authenticator("munge", reader=0).seal(text)
        return client.call("order", node=NODE, credential=credential, timeout=90)["result"]


def start(spec):
    """Start the kernel; return a client of the kernel, and the kernel's process."""
    public, secret = zmq.curve_keypair()
    secrets = {
        "key": uuid.uuid4().hex, "signature_scheme": "hmac-sha256",
        "curve_publickey": public.decode(), "curve_secretkey": secret.decode(),
    }  # fmt: skip
    found = send({"do": "start", "kernel": spec, "cwd": "/tmp", "secrets": secrets, "options": {}})
    client = BlockingKernelClient()
    kept = {k: v for k, v in found.items() if k == "ip" or k.endswith("_port")}
    client.load_connection_info({"transport": "tcp", **kept, **secrets})
    client.start_channels()
    client.wait_for_ready(timeout=120)
    return client, found["pid"]


def run(client, code):
    text = []

    def hook(message):
        content = message["content"]
        text.append(content.get("text") or "\n".join(content.get("traceback", [])))

    reply = client.execute_interactive(code, timeout=120, allow_stdin=False, output_hook=hook)
    assert reply["content"]["status"] == "ok", "".join(text)
    return "".join(text).strip()


def main():
    client = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if "start" in asked:
                client, found = start(asked["start"])
            elif "code" in asked:
                found = run(client, asked["code"])
            else:
                found = send(asked)
        except GPUPoolError as error:
            found = {"code": error.code, "message": str(error)}
        print(json.dumps(found), flush=True)


main()
