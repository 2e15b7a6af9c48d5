# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool pause``, ``drain``, ``resume``: take GPUs out of service and put them back."""

from __future__ import annotations

import sys
import time
from typing import Any, Mapping, Sequence

from ..client import Client
from .status import socket_path

#: Seconds between two checks of an order's progress.
LOOK = 0.5

#: Seconds until the command prints the broker's note on an order that is not complete yet. It
#: prints the note earlier if it knows what the order waits for.
AT_ONCE = 2.0

#: Time-out in seconds for a request that makes the broker test GPUs.
TEST_TIMEOUT = 600.0


def pause(socket: str, device: str, reason: str) -> int:
    """Pause the pool or one GPU, and wait until the pause is complete.

    Return 0, or 130 if interrupted. When this returns 0, no kernel has a slice on these GPUs, and
    no process of the pool has one of their device files open.
    """
    return _until_done(socket, "pause", device, reason)


def drain(socket: str, device: str, reason: str) -> int:
    """Drain one GPU, and wait until no kernel has a slice on it.

    Return 0, or 130 if interrupted.
    """
    return _until_done(socket, "drain", device, reason)


def resume(socket: str, device: str) -> int:
    """Put all GPUs or one GPU back into service; return 0.

    Raises
    ------
    RefusedError
        If nothing is paused, or the driver does not start.
    """
    with Client(socket_path(socket)) as client:
        if _will_test(client.call("status"), device):
            print("Finding and testing the GPUs ...", flush=True)
        print(client.call("maintain", action="resume", device=device, timeout=TEST_TIMEOUT)["note"])
    return 0


def retest(socket: str) -> str:
    """Let the broker test every failed GPU again; return the result as a sentence."""
    with Client(socket_path(socket)) as client:
        answer = client.call("maintain", action="retest", timeout=TEST_TIMEOUT)
    return str(answer["note"])


def _until_done(socket: str, action: str, device: str, reason: str) -> int:
    with Client(socket_path(socket)) as client:
        answer = client.call("maintain", action=action, device=device, reason=reason)
        try:
            return _wait(client, str(answer["device"]), str(answer["note"]))
        except KeyboardInterrupt:  # the order is already in force
            target, where = (f" --device {device}", " on this GPU") if device else ("", "")
            print(
                f"\nThe {action} is not finished, but it stays in force: kernels give their "
                f"slices back when they are idle, and no kernel gets a new slice{where}. To see "
                "the progress: jupyter gpupool status. To cancel: jupyter gpupool "
                f"resume{target}.",
                file=sys.stderr,
            )
            return 130


def _will_test(status: Mapping[str, Any], device: str) -> bool:
    """Return whether the broker will test GPUs when it gets the order to resume ``device``.

    If it will test no GPU, its answer to the order says why.
    """
    orders = {str(row["device"]) for row in status.get("maintenance") or ()}
    if not device:
        return bool(orders)
    named = {
        str(d["uuid"])
        for d in status["devices"]
        if device == str(d["index"]) or str(d["uuid"]).startswith(device)
    }
    return len(named) == 1 and named <= orders


def _wait(client: Client, uuid: str, note: str) -> int:
    told: list[str] = []
    began = time.monotonic()
    while True:
        orders = client.call("status").get("maintenance") or []
        order = next((row for row in orders if row["device"] == uuid), None)
        if order is None:
            print(
                "Somebody has resumed the pool or this GPU, so the order ended before it was done. "
                "Run the command again if you still need it.",
                file=sys.stderr,
            )
            return 1
        if order["closed"]:
            print("\n".join([order["text"], *_outside(order)]))
            return 0
        lines = progress(order)
        if note and (lines or time.monotonic() - began >= AT_ONCE):
            print(note, flush=True)
            note = ""
        if lines != told:
            print("\n".join(lines), flush=True)
            told = lines
        time.sleep(LOOK)


def progress(order: Mapping[str, Any]) -> list[str]:
    """Return lines that say what an order still waits for: kernels, a step, or processes."""
    waits, others = order["waits"], order["others"]
    lines = []
    if waits or others:
        count = len(waits) + others
        lines.append(f"Waiting for {count} kernel{'s' if count > 1 else ''}:")
        lines += [_kernel(row) for row in waits]
        if others:
            lines.append(f"  {others} of other users")
        return lines
    if order.get("step"):
        return [f"Waiting for {order['step']}."]
    files = [row for row in order.get("files") or () if row["session"]]
    if files:
        one = order.get("device")
        where, what = (" on this GPU", "its device file") if one else ("", "device files")
        lines.append(
            f"No kernel has a slice{where} any more, but these processes still have {what} open:"
        )
        lines += [_process(row) for row in files]
    return lines


def _kernel(row: Mapping[str, Any]) -> str:
    gpus = ", ".join(row["devices"])
    name = row["label"] or row["session"]
    return f"  {name} ({row['owner']}, session {row['session']}, GPU {gpus}): {row['why']}"


def _process(row: Mapping[str, Any]) -> str:
    whose = "the broker's" if row["session"] == "broker" else f"session {row['session']}"
    todo = "" if row["session"] == "broker" else "; restart that kernel"
    return f"  process {row['pid']} ({whose}): {row['command']}{todo}"


def _outside(order: Mapping[str, Any]) -> Sequence[str]:
    """Return lines about processes outside the pool that have device files open."""
    lines = []
    files = [row for row in order.get("files") or () if not row["session"]]
    if files:
        what = "the GPU's device file" if order.get("device") else "device files"
        lines.append(f"Processes outside the pool that have {what} open:")
        lines += [f"  {row['pid']} (user id {row['uid']}): {row['command']}" for row in files]
    if order.get("unseen"):
        lines.append(
            "Number of other users' processes whose open files the broker cannot see: "
            f"{order['unseen']}. To see these files, run as root: fuser -v /dev/nvidia*"
        )
    return lines
