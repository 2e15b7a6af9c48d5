# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The commands of a cluster: join it, see it, fence a machine. They need the extra ``cluster``."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import defaultdict
from pathlib import Path
from typing import Any, Mapping

from ..errors import Code, RefusedError
from ..units import format_bytes, format_seconds
from .registry import JSON, SOCKET, Options, argument, command, either

TOKEN = argument(
    "--token", type=Path, default=Path("/etc/gpupool/cluster-token"), metavar="FILE",
    help="file with the cluster's token (default: /etc/gpupool/cluster-token)",
)  # fmt: skip


@command(
    "Several machines", "let this machine join a cluster, until it is ended",
    either(
        argument("--head", action="store_true", help="begin a cluster: this is its first machine"),
        argument("--join", default="", metavar="ADDRESS", help="the head's, such as 10.0.0.1:6379"),
    ),
    argument("--port", type=int, default=6379, help="of the head (default: 6379)"),
    argument(
        "--config", type=Path, action="append", default=[], metavar="FILE",
        help="also read this file, after those that Jupyter reads",
    ),
    TOKEN, SOCKET,
)  # fmt: skip
def _node(options: Options) -> int:
    if not options.head and not options.join:
        raise RefusedError(
            "A machine begins a cluster or joins one.",
            code=Code.BAD_REQUEST,
            next_step="Give --head, or --join with the head's address.",
        )
    from ..cluster.node import run_node

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    return asyncio.run(
        run_node(
            join=options.join, port=options.port, broker=options.socket, config=options.config,
            token=options.token,
        )
    )  # fmt: skip


@command(
    "Several machines", "show the machines of a cluster, or fence one",
    argument("do", choices=("status", "fence"), help="status, or fence: no kernel runs there"),
    argument("machine", nargs="?", default="", metavar="MACHINE", help="which one to fence"),
    argument("--address", required=True, metavar="ADDRESS", help="the head's: 10.0.0.1:6379"),
    TOKEN, JSON,
)  # fmt: skip
def _cluster(options: Options) -> int:
    from ..cluster.node import check_ray, token_environment

    check_ray()
    if (options.do == "fence") != bool(options.machine):
        raise RefusedError(
            "fence needs the name of a machine, and status takes none.", code=Code.BAD_REQUEST
        )
    os.environ.update(token_environment(options.token, create=False))
    from ..cluster.ray_ledger import fence, view

    if options.do == "fence":
        fence(options.address, options.machine)
    found = view(options.address)
    print(json.dumps(found, indent=2) if options.json else picture(found))
    return 0


def picture(found: Mapping[str, Any]) -> str:
    """Return the machines of a cluster and what each may use, as text."""
    lines = (
        [] if found["serving"] else ["The ledger lends nothing before it has heard all of them."]
    )
    for node in found["nodes"]:
        age = f", last heard {format_seconds(node['age'])} ago" if node["life"] else ""
        lines.append(f"{node['name']}: {node['state']}{age}")
        by_name: dict[str, list[str]] = defaultdict(list)
        for kind, name, resource, _, amount in node["counted"]:
            text = format_bytes(amount) if resource == "memory" else f"{amount} {resource}"
            by_name[f"{kind} {name}"].append(text)
        lines += [f"  {name} may use {', '.join(parts)}" for name, parts in by_name.items()]
    return "\n".join(lines)
