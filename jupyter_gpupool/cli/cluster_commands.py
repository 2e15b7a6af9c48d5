# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The commands for a cluster: join or show the cluster, drain or fence a machine.

All commands except ``leave`` need the package's extra ``cluster``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Mapping

from ..cluster.considering import uses
from ..errors import Code, RefusedError
from ..units import format_seconds
from .leaving import carry_out, leave, node_called
from .registry import JSON, SOCKET, Options, argument, command, either

TOKEN = argument(
    "--token", type=Path, default=Path("/etc/gpupool/cluster-token"), metavar="FILE",
    help="file with the cluster's token (default: /etc/gpupool/cluster-token)",
)  # fmt: skip


@command(
    "Several machines", "let this machine join a cluster, until this command ends",
    either(
        argument("--head", action="store_true", help="begin a cluster with this machine"),
        argument(
            "--join", default="", metavar="ADDRESS",
            help="address of the head, such as 10.0.0.1:6379",
        ),
    ),
    argument("--port", type=int, default=6379, help="port of the head (default: 6379)"),
    argument(
        "--config", type=Path, action="append", default=[], metavar="FILE",
        help="also read this file, after those that Jupyter reads",
    ),
    TOKEN, SOCKET,
)  # fmt: skip
def _node(options: Options) -> int:
    if not options.head and not options.join:
        raise RefusedError(
            "This machine must either begin a cluster or join one.",
            code=Code.BAD_REQUEST,
            next_step="Use --head to begin one, or --join with the address of its head.",
        )
    import asyncio  # imported here, because this import would make every command slower
    import logging

    from ..cluster.node import run_node

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    return asyncio.run(
        run_node(
            join=options.join, port=options.port, broker=options.socket, config=options.config,
            token=options.token,
        )
    )  # fmt: skip


#: By order: the state that the machine has when the order is done. The command waits for this
#: state. It does not wait if the state is "".
ORDERS = {"drain": "left", "resume": "present", "fence": ""}


@command(
    "Several machines", "show the machines of a cluster, drain or fence one, or leave it",
    argument(
        "do", choices=("status", *ORDERS, "leave"), metavar="ORDER",
        help="status: show the machines; drain: a machine leaves the cluster once no kernel has a "
        "slice there; resume: take the machine back; fence: tell the ledger that no kernel runs on "
        "the machine any more; leave: drain this machine",
    ),
    argument(
        "machine", nargs="?", default="", metavar="MACHINE",
        help="the machine to drain, resume or fence",
    ),
    argument(
        "--address", default="", metavar="ADDRESS",
        help="address of the head, such as 10.0.0.1:6379",
    ),
    TOKEN, SOCKET, JSON,
)  # fmt: skip
def _cluster(options: Options) -> int:
    do, machine, address = options.do, options.machine, options.address
    if (do in ORDERS) != bool(machine):
        takes = "needs" if do in ORDERS else "does not take"
        raise RefusedError(
            f"jupyter gpupool cluster {do} {takes} the name of a machine.", code=Code.BAD_REQUEST
        )
    if do == "leave":
        return leave(options.socket)
    from ..cluster.node import check_ray, token_environment

    check_ray()
    if not address:
        raise RefusedError(
            "This command needs the address of the cluster's head.",
            code=Code.BAD_REQUEST,
            next_step="Add --address with the address, such as 10.0.0.1:6379.",
        )
    os.environ.update(token_environment(options.token, create=False))
    from ..cluster.ledger_calls import LedgerCalls

    with LedgerCalls(address) as ledger:
        if do in ("drain", "resume"):
            return carry_out(
                do, machine, ORDERS[do],
                look=lambda: ledger.call(f"for the state of {machine}", "view"),
                order=lambda: ledger.call(f"to {do} {machine}", "drain", machine, do == "drain"),
            )  # fmt: skip
        if do == "fence":
            # The ledger accepts an unknown name without an error, so this command checks the name.
            node_called(machine, ledger.call(f"to fence {machine}", "view"))
            ledger.call(f"to fence {machine}", "fence", machine)
        found = ledger.call("for the list of machines", "view")
    print(json.dumps(found, indent=2) if options.json else picture(found))
    return 0


def picture(found: Mapping[str, Any]) -> str:
    """Return a text with each machine of a cluster, and what users and groups may use on it."""
    lines = (
        [] if found["serving"] else ["The ledger lends nothing until all machines have reported."]
    )
    for node in found["nodes"]:
        age = f", last report {format_seconds(node['age'])} ago" if node["life"] else ""
        lines.append(f"{node['name']}: {node['state']}{age}")
        lines += [f"  {row}" for row in uses(node)]
    return "\n".join(lines)
