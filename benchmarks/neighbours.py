# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The effect of one user's attack on another user: the latency with and without the attack.

One broker with emulated devices serves two users of the machine, so this benchmark needs root. The
first user, the victim, has one session. With pauses of 20 ms, the victim asks for ``status`` on a
new connection, and the session gets a slice and gives it back. The second user runs each kind of
attack of ``attack.py`` for some seconds. The baseline, in the same run, is the victim's latency
before the first attack and after the last attack. The benchmark compares the p99 of each attack
with the p99 of the baseline.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.attack import KINDS
from benchmarks.broker_rpc import Peer, rss, timed
from benchmarks.common import budget, percentile, summary

ROOT = Path(__file__).parents[1]

#: User ids that have no account on the machine. The broker treats them as normal users.
VICTIM, ATTACKER = 21001, 21002

#: Limits during an attack: the p99 divided by the baseline's p99, and the broker's memory in bytes.
RATIO_BUDGET = 3.0
MEMORY_BUDGET = 100e6

#: Seconds between two requests of the victim.
PAUSE = 0.02


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return latencies in milliseconds and memory in bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer kinds, shorter")
    parser.add_argument("--kinds", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=0.0)
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        raise SystemExit("Only root can be two users: run this benchmark as root.")
    kinds = options.kinds or (["status", "journal"] if options.quick else [*KINDS])
    seconds = options.seconds or (2.0 if options.quick else 8.0)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="gpb", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with broker(folder) as (path, pid):
            quiet = measure(path, 3 * seconds)
            print("quiet", shown(quiet), f"rss {rss(pid) / 1e6:.0f} MB", flush=True)
            for kind in kinds:
                found[kind] = one = attacked(path, pid, kind, seconds)
                print(kind, shown(one), f"rss {one['rss_bytes'] / 1e6:.0f} MB",
                      one["attacker"], flush=True)  # fmt: skip
            calm = measure(path, seconds)
            rss_after = rss(pid)
    # The machine's speed varies. So the baseline has the times before and after all attacks.
    base = {what: [*quiet[what], *calm[what]] for what in quiet}
    result: dict[str, Any] = {
        "emulated": True,
        "quiet_ms": {what: summary(values) for what, values in base.items()},
        "attacked": {},
        "rss_after_bytes": rss_after,
    }
    budgets = []
    for kind, one in found.items():
        ratios = {}
        for what, values in base.items():
            ratios[what] = percentile(one[what], 99) / percentile(values, 99)
            budgets.append(
                budget(f"p99 of {what} under a neighbour's {kind}, against quiet",
                       ratios[what], RATIO_BUDGET, "x")
            )  # fmt: skip
        result["attacked"][kind] = {
            "status_ms": summary(one["status"]),
            "grant_ms": summary(one["grant"]),
            "ratio_p99": ratios,
            "rss_bytes": one["rss_bytes"],
            "attacker": one["attacker"],
        }
    peak = max(one["rss_bytes"] for one in found.values())
    budgets.append(
        budget("memory of the broker under attack", peak / 1e6, MEMORY_BUDGET / 1e6, "MB")
    )
    return {**result, "budgets": budgets}


def shown(found: dict[str, Any]) -> str:
    return " ".join(
        f"{what} p50 {percentile(found[what], 50):.1f} p99 {percentile(found[what], 99):.1f} ms"
        for what in ("status", "grant")
    )


@contextmanager
def broker(folder: Path) -> Iterator[tuple[Path, int]]:
    """Run a broker for every user; yield its socket and its pid."""
    path = Path("/run") / folder.name / "broker.sock"
    config = folder / "config.json"
    settings = {
        "emulate": "2x16GiB,context=32MiB",
        "state_dir": str(folder / "state"),
        "default_memory": 1 << 30,
        "default_limit": 1 << 30,
        "idle_timeout": 86400,
    }
    config.write_text(json.dumps({"GPUPool": settings}))
    reading, writing = os.pipe()
    with (folder / "broker.log").open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "jupyter_gpupool.broker", "--config", str(config),
                "--socket", str(path), "--ready-fd", str(writing),
            ],
            stderr=log, pass_fds=(writing,), cwd=ROOT,
            env={**os.environ, "JUPYTER_NO_CONFIG": "1", "JUPYTER_CONFIG_DIR": str(folder)},
        )  # fmt: skip
    os.close(writing)
    try:
        if not select.select([reading], [], [], 120)[0]:
            raise TimeoutError("the broker did not start")
        answer = json.loads(os.read(reading, 65536) or b"{}")
        if not answer.get("ok"):
            raise RuntimeError((folder / "broker.log").read_text())
        yield path, process.pid
    finally:
        os.close(reading)
        process.terminate()
        process.wait(120)
        print(f"log of the broker: {(folder / 'broker.log').stat().st_size} bytes", flush=True)
        shutil.rmtree(path.parent, ignore_errors=True)


def measure(path: Path, seconds: float) -> dict[str, list[float]]:
    """Run the victim in its own process; return the milliseconds of its requests."""
    process = start(["-m", "benchmarks.neighbours", "--victim", str(path), str(seconds)], VICTIM)
    output, _ = process.communicate(timeout=seconds + 120)
    if process.returncode != 0:
        raise RuntimeError("the victim failed")
    found: dict[str, list[float]] = json.loads(output.splitlines()[-1])
    return found


def attacked(path: Path, pid: int, kind: str, seconds: float) -> dict[str, Any]:
    """Return the victim's milliseconds under an attack, and the broker's highest memory."""
    attack = start([str(ROOT / "benchmarks" / "attack.py"), str(path), kind, str(seconds + 2)],
                   ATTACKER)  # fmt: skip
    time.sleep(1.0)
    victim = start(["-m", "benchmarks.neighbours", "--victim", str(path), str(seconds)], VICTIM)
    most = rss(pid)
    while victim.poll() is None:
        most = max(most, rss(pid))
        time.sleep(0.05)
    output, _ = victim.communicate(timeout=60)
    told, _ = attack.communicate(timeout=60)
    if victim.returncode != 0:
        raise RuntimeError(f"the victim failed under {kind}")
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return {**found, "rss_bytes": most, "attacker": json.loads(told.splitlines()[-1])}


def start(arguments: Sequence[str], user: int) -> subprocess.Popen[str]:
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        raise SystemExit("setpriv (util-linux) is needed to be two users.")
    # Perhaps only root can read the folder of the interpreter. So the process keeps the capability
    # to read all files. For the broker, the process still belongs to ``user``.
    who = [f"--reuid={user}", f"--regid={user}", "--clear-groups"]
    may = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    return subprocess.Popen(
        [setpriv, *who, *may, sys.executable, *arguments],
        stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


def be_victim(path: Path, seconds: float) -> dict[str, list[float]]:
    """Ask for status and for a slice in turn; return the milliseconds of each request by kind."""
    server = Peer(path)
    opened = server.call("open", kernel_id="victim")
    server.call("launched", session=opened["session"], pid=os.getpid())
    kernel = Peer(path)
    kernel.call("hello", session=opened["session"], token=opened["token"])
    found: dict[str, list[float]] = {"status": [], "grant": []}
    ends = time.monotonic() + seconds

    def status() -> None:
        peer = Peer(path)
        peer.call("status")
        peer.file.close()
        peer.socket.close()

    while time.monotonic() < ends:
        found["status"].append(timed(status))
        found["grant"].append(timed(lambda: kernel.call("hold", hold="h", kind="cell", wait=True)))
        kernel.send("drop", hold="h")
        kernel.call("release")
        kernel.until(lambda m: m["type"] == "lease" and m["state"] == "detached")
        time.sleep(PAUSE)
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--victim"]:
        print(json.dumps(be_victim(Path(sys.argv[2]), float(sys.argv[3]))))
    else:
        print(json.dumps(main(sys.argv[1:])["budgets"], indent=1))
