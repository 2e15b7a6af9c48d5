# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A user of one machine, as a process that sends orders to other machines through its own broker.

``python -m tests.cluster.remote_user SOCKET``. Each line of standard input is a call: a type of
message and its fields, or ``seal`` with a machine and an order.
"""

from __future__ import annotations

import json
import sys

from jupyter_gpupool.client import Client
from jupyter_gpupool.cluster.authenticators import authenticator
from jupyter_gpupool.cluster.identity import order_text
from jupyter_gpupool.errors import GPUPoolError


def answer(client, kind, fields):
    if kind == "seal":
        identity = authenticator(fields["identity"], reader=fields["reader"])
        return {"credential": identity.seal(order_text(fields["node"], fields["order"]))}
    return client.call(kind, timeout=90, **fields)


def main(socket):
    with Client(socket) as client:
        for line in sys.stdin:
            try:
                found = answer(client, *json.loads(line))
            except GPUPoolError as error:
                found = {"code": error.code, "message": str(error)}
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
