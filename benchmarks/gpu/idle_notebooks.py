# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Device memory that idle notebooks keep, as NVML shows it.

Pooled GPU kernels put an array each on the device, one kernel after the other, and do nothing more.
The pool takes their slices back after ``idle_timeout``. The benchmark reads the used bytes before
the first array and after all slices are back, and reports the difference. So the figure includes
contexts. The baseline, in the same run, is plain ipykernels that allocate the same arrays and wait
for the same time. At the end, one notebook uses its array again, and the benchmark checks it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil

from benchmarks.common import budget
from benchmarks.kernels import Kernel, driver_environment, private_pool
from jupyter_gpupool.client import Client
from jupyter_gpupool.devices import vendor

from .child import Remote, remote

GiB, MiB = 1 << 30, 1 << 20

#: Number of notebooks, number of plain kernels, and bytes that each kernel puts on the device.
NOTEBOOKS, PLAIN, STATE = 16, 4, GiB // 2

#: On an emulated device: the number of notebooks, and the number by which STATE is divided.
FEW, SCALE = 6, 16

#: After QUIET seconds without CUDA a kernel is idle. After TIMEOUT more seconds it loses its slice.
QUIET, TIMEOUT = 0.5, 2.0

#: A cell may take this many seconds. All notebooks together may also take this many seconds until
#: none of them has a slice.
PATIENCE = 45.0

#: The most seconds that the benchmark waits until all bytes of the notebooks are free again. If
#: some bytes stay in use, this bound leaves time for the rest of the benchmark.
LAST_BYTE = 25.0

CELL = """
from benchmarks.gpu.raw import Raw
raw = Raw()
raw.put("state", %d, %d)
"""

AGAIN = """
import time
begun = time.monotonic()
raw.add("state", 1)
took = time.monotonic() - begun
print(int(raw.check("state", %d)), took)
"""


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return the bytes that stay in use on the device, and the bytes in host memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer notebooks")
    options = parser.parse_args(argv)
    real = vendor.driver_present()
    count = NOTEBOOKS if real and not options.quick else FEW
    plain = PLAIN if real and not options.quick else 2
    state = STATE if real else STATE // SCALE
    with ExitStack() as stack:
        names = stack.enter_context(
            private_pool(quiet_after=QUIET, idle_timeout=TIMEOUT, host_memory="80%",
                         sample_interval=0.5)
        )  # fmt: skip
        outside = driver_environment()
        see = stack.enter_context(eyes({**os.environ, **outside}))
        return {
            "what": "device bytes that idle notebooks keep, as NVML shows them",
            "emulated": not real,
            "device_names": names,
            "state_bytes": state,
            **measure(see, outside, count, plain, state),
        }


class See:
    """Reads NVML's figures through another process, which uses no device."""

    def __init__(self, loop: asyncio.AbstractEventLoop, far: Remote) -> None:
        self._loop, self._far = loop, far

    def used(self) -> int:
        return int(self._loop.run_until_complete(self._far.do("used")))

    def shown(self) -> dict[str, Any]:
        return dict(self._loop.run_until_complete(self._far.do("shown")))

    def until(self, most: int, seconds: float) -> tuple[int, float]:
        """Wait until at most ``most`` bytes are in use; return the lowest figure and its time.

        The wait lasts at most ``seconds``. The time is from ``time.monotonic``, and says when
        NVML first showed the lowest figure.
        """
        deadline = time.monotonic() + seconds
        least, at = self.used(), time.monotonic()
        while least > most and time.monotonic() < deadline:
            time.sleep(0.02)
            if (used := self.used()) < least:
                least, at = used, time.monotonic()
        return least, at

    def settled(self, seconds: float = 10.0) -> int:
        """Wait until the bytes in use have not changed for a second; return their number."""
        deadline, last, since = time.monotonic() + seconds, self.used(), time.monotonic()
        while time.monotonic() < deadline and time.monotonic() - since < 1:
            time.sleep(0.05)
            if (now := self.used()) != last:
                last, since = now, time.monotonic()
        return last


@contextmanager
def eyes(env: Mapping[str, str]) -> Iterator[See]:
    """Yield a reader of NVML's figures."""
    loop = asyncio.new_event_loop()
    try:
        scope = remote("benchmarks.gpu.raw:Eyes", env)
        far = loop.run_until_complete(scope.__aenter__())
        try:
            yield See(loop, far)
        finally:
            loop.run_until_complete(scope.__aexit__(None, None, None))
    finally:
        loop.close()


def measure(
    see: See, outside: Mapping[str, str], count: int, plain: int, state: int
) -> dict[str, Any]:
    """Run the notebooks and the baseline; return their figures."""
    with Client(os.environ["GPUPOOL_SOCKET"]) as client, ExitStack() as stack:
        memory = state + GiB
        kernels = [
            stack.enter_context(Kernel("gpupool-python3", attach="lazy", memory=memory))
            for _ in range(count)
        ]
        before_rss = sum(rss(kernel) for kernel in kernels)
        base = see.settled()
        most = base
        for number, kernel in enumerate(kernels):
            kernel.run(CELL % (state, number), PATIENCE)
            most = max(most, see.used())
        last_call = time.monotonic()
        print(f"{count} notebooks have used the device: {most - base} bytes at most", flush=True)
        used, at = see.until(base, LAST_BYTE)
        seconds = at - last_call
        sessions = wait_detached(client, count)
        left = max(0, see.settled() - base)
        shown = see.shown()
        pids = {str(kernel.pid) for kernel in kernels}
        print(f"{left} bytes left after {seconds:.1f} s", flush=True)
        after_rss = sum(rss(kernel) for kernel in kernels)
        right, again = kernels[0].run(AGAIN % 1, PATIENCE).split()
        pooled = {
            "notebooks": count,
            "tier": client.call("status")["devices"][0]["tier"],
            "device_bytes_before": base,
            "device_bytes_most": most - base,
            "device_bytes_left": left,
            "device_bytes_left_of_each_process": {
                str(i): shown.get(str(kernel.pid), 0) for i, kernel in enumerate(kernels)
            },
            "processes_shown_by_nvml": len(pids & set(shown)),
            "seconds_until_the_last_byte_was_back": seconds,
            "all_bytes_were_back": used <= base,
            "seconds_of_them_configured": QUIET + TIMEOUT,
            "states": sorted({s["state"] for s in sessions}),
            "host_bytes_of_suspended_state": sum(s["suspended_bytes"] for s in sessions),
            "host_bytes_resident_more": after_rss - before_rss,
            "used_again": {"right": right == "1", "seconds": float(again)},
        }
    base = see.settled()
    with ExitStack() as stack:
        kernels = [stack.enter_context(Kernel("python3", outside)) for _ in range(plain)]
        for number, kernel in enumerate(kernels):
            kernel.run(CELL % (state, number), PATIENCE)
        # Give the plain kernels the time that the pooled kernels needed, but at most 10 s.
        see.until(base, min(seconds, 10.0))
        stays = max(0, see.settled() - base)
    each, plain_each = left / count, stays / plain
    return {
        "pooled": pooled,
        "plain": {"notebooks": plain, "device_bytes_left": stays},
        "device_bytes_left_each": {"pooled": each, "plain": plain_each},
        "ratio": each / plain_each if plain_each else None,
        "problems": [] if right == "1" else ["the array used again: DATA WAS LOST"],
        "budgets": [
            budget(f"device bytes left by {count} idle notebooks", float(left), 0.0, "bytes")
        ],
    }


def wait_detached(client: Client, count: int) -> list[dict[str, Any]]:
    """Wait at most PATIENCE seconds until no session has a slice; return the sessions."""
    deadline = time.monotonic() + PATIENCE
    while True:
        sessions = client.call("status")["sessions"]
        if sum(s["state"] == "detached" for s in sessions) >= count:
            return list(sessions)
        if time.monotonic() > deadline:
            return list(sessions)
        time.sleep(0.05)


def rss(kernel: Kernel) -> int:
    return int(psutil.Process(kernel.pid).memory_info().rss)


if __name__ == "__main__":
    json.dump(main(sys.argv[1:]), sys.stdout, indent=2)
    print()
