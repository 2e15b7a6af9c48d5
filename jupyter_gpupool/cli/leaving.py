# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Orders a machine to leave its cluster or to come back, and waits until the order is done."""

from __future__ import annotations

import sys
import time
from typing import Any, Callable, Mapping

from ..client import Client
from ..cluster.considering import uses
from ..errors import Code, RefusedError
from .status import socket_path

#: Seconds between two checks of an order's progress.
LOOK = 0.5

#: By order: states that show that the ledger does not know the order, although the command has
#: sent it. In this case the ledger has restarted, so the command sends the order again.
UNDONE = {"drain": ("present",), "resume": ("draining", "left")}

_NEXT = (
    "You may now switch this machine off: end jupyter gpupool node on it, and remove it from "
    "c.GPUPool.cluster_nodes on the other machines. To take the machine back: jupyter gpupool "
    "cluster resume {}."
)


def node_called(name: str, view: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the machine ``name`` from the ledger's view.

    Raises
    ------
    RefusedError
        If the cluster has no machine of this name.
    """
    nodes = {node["name"]: node for node in view["nodes"]}
    if name not in nodes:
        raise RefusedError(
            f"No machine of this cluster is called {name[:60]}. It has: {', '.join(nodes)}.",
            code=Code.BAD_REQUEST,
        )
    found: Mapping[str, Any] = nodes[name]
    return found


def carry_out(
    do: str,
    machine: str,
    goal: str,
    *,
    look: Callable[[], Mapping[str, Any]],
    order: Callable[[], None],
) -> int:
    """Order a machine to drain or come back, and wait until the order is done.

    Return 0, or 130 if interrupted.
    """
    printer, ordered = _Printer(), False
    try:
        while True:
            node = node_called(machine, look())
            state = node["state"]
            if do == "drain" and state in ("left", "gone"):
                why = "no kernel has a slice there" if state == "left" else "it was fenced"
                printer.tell(f"{machine} has left the cluster: {why}.")
                printer.tell(_NEXT.format(machine))
                return 0
            if ordered and state == goal:
                printer.tell(f"{machine} is back in the cluster.")
                return 0
            if not ordered or state in UNDONE[do]:
                order()
                ordered = True
            printer.tell("\n  ".join([f"{machine}: {state}", *uses(node)]))
            time.sleep(LOOK)
    except KeyboardInterrupt:
        print("\nThe order stays in force. To see its progress: jupyter gpupool cluster status.",
              file=sys.stderr)  # fmt: skip
        return 130


def leave(socket: str) -> int:
    """Drain this machine, and wait until it has left its cluster.

    Return 0, or 130 if interrupted.
    """
    printer = _Printer()
    with Client(socket_path(socket)) as client:
        try:
            while True:
                found = client.call("leave")
                name = found["name"]
                if found["left"]:
                    printer.tell(f"{name} has left the cluster.")
                    printer.tell(_NEXT.format(name))
                    return 0
                printer.tell(_waits_for(found))
                time.sleep(LOOK)
        except KeyboardInterrupt:
            print("\nThe order stays in force: idle kernels give their slices back, and no kernel "
                  "gets a new slice here.", file=sys.stderr)  # fmt: skip
            return 130


def _waits_for(found: Mapping[str, Any]) -> str:
    slices = int(found["kernels"])
    if slices:
        return f"Waiting for {slices} kernel{'s' if slices > 1 else ''} with a slice here."
    if not found["connected"]:
        return "Waiting for the ledger of the cluster, which does not answer."
    return "Waiting for the ledger of the cluster to record the order."


class _Printer:
    """Prints a text only if it differs from the text that it printed before."""

    def __init__(self) -> None:
        self._last = ""

    def tell(self, text: str) -> None:
        if text != self._last:
            print(text, flush=True)
            self._last = text
