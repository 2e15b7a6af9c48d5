# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``make cluster``: three machines of a cluster on this host, on emulated GPUs, to try it out.

``python -m jupyter_gpupool.cluster.trial [FOLDER]`` starts a broker and a node for each machine,
prints how to use them, and ends them all at Ctrl-C. Without FOLDER their files are in a temporary
folder, which the program removes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import GPUPoolError
from .node import RAY_FOLDER, check_ray, own_address

NAMES = ("gpu1", "gpu2", "gpu3")

#: Slices that each user may have on all machines together.
QUOTA = 2

#: In seconds. ``LOOK``: the pause between two checks of the processes. ``START``: the time-out
#: for the start of the whole cluster. ``PATIENCE``: the time-out for the end of a process.
LOOK, START, PATIENCE = 0.5, 180.0, 20.0

#: If a process ends unexpectedly, the program prints this many lines from the end of its log.
TAIL = 15


class EndedError(Exception):
    """A process of the cluster has ended unexpectedly, or the cluster does not start."""


class TrialCluster:
    """The processes of the three machines.

    Parameters
    ----------
    head:
        The address of Ray's head.
    program:
        The words of the command line that run ``jupyter gpupool``.
    """

    def __init__(self, folder: Path, head: str, program: Sequence[str]) -> None:
        self.folder, self.head, self.token = folder, head, folder / "token"
        self._program = [*program]
        #: The folder that contains each machine's Ray folder. Its path is short: with the path of
        #: ``folder``, the paths of Ray's sockets could become too long.
        self._ray = tempfile.TemporaryDirectory(
            prefix="gpupool-ray-", dir="/tmp", ignore_cleanup_errors=True
        )
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, look: Callable[[], Mapping[str, Any] | None]) -> None:
        """Start all machines; wait until ``look`` shows that all have reported to the ledger."""
        until = time.monotonic() + START
        for name in NAMES:
            files = ("--config", str(self._configure(name)), "--socket", str(self.socket(name)))
            self._run(f"{name}-broker", "broker", *files)
            where: tuple[str, ...] = ("--join", self.head)
            if name == NAMES[0]:
                where = ("--head", "--port", self.head.rpartition(":")[2])
            self._run(f"{name}-node", "node", *where, "--token", str(self.token), *files)
            if name == NAMES[0]:
                self._wait(lambda: look() is not None, until)  # the other machines need the head
        self._wait(lambda: bool((look() or {}).get("serving")), until)

    def watch(self) -> None:
        """Wait without end; raise if a process ends."""
        self._wait(lambda: False, float("inf"))

    def close(self) -> None:
        """End all processes, in the reverse order of their start."""
        for process in reversed(self._running.values()):
            process.terminate()
        for process in self._running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
            # Ray's own agents would run some minutes longer than their raylet, so kill them.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._ray.cleanup()

    def socket(self, name: str) -> Path:
        """Return the path at which a machine's broker listens."""
        return self.folder / f"{name}.sock"

    def look(self) -> Mapping[str, Any] | None:
        """Return what the cluster's ledger knows; None while no ledger answers."""
        words = ("cluster", "status", "--address", self.head, "--token", str(self.token), "--json")
        done = subprocess.run([*self._program, *words], capture_output=True, check=False)
        found: Mapping[str, Any] | None = json.loads(done.stdout) if not done.returncode else None
        return found

    def text(self) -> str:
        """Return how to use the cluster."""
        command = f"{Path(sys.executable).parent / 'jupyter'} gpupool"
        slice_ = f"{command} run --attach hold --socket {self.socket(NAMES[0])} -- sleep 600"
        where = f"--address {self.head} --token {self.token}"
        return (
            f"{len(NAMES)} machines form a cluster: {', '.join(NAMES)}. Each has one emulated GPU. "
            f"You may have {QUOTA} slices on all of them together.\n"
            f"To take a slice, run this in another terminal:\n  {slice_}\n"
            "Run it in two more terminals with the sockets of "
            f"{' and '.join(NAMES[1:])}: the third command waits.\n"
            f"See why it waits:\n  {command} status --socket {self.socket(NAMES[-1])}\n"
            f"See what each machine may use:\n  {command} cluster status {where}\n"
            "Take a machine out of the cluster (`cluster resume` brings it back):\n"
            f"  {command} cluster drain {NAMES[0]} {where}\n"
            f"Open notebooks on a machine:\n  GPUPOOL_SOCKET={self.socket(NAMES[0])} jupyter lab\n"
            f"Logs are in {self.folder}. Ctrl-C ends the cluster."
        )

    def _configure(self, name: str) -> Path:
        path = self.folder / f"{name}.json"
        options = {
            "cluster_nodes": list(NAMES), "cluster_node": name, "emulate": "1x16GiB",
            "state_dir": str(self.folder / f"{name}-state"), "linger": 7 * 86400,
            "quotas": {"*": {"leases": QUOTA}},
        }  # fmt: skip
        path.write_text(json.dumps({"GPUPool": options}))
        return path

    def _run(self, name: str, *words: str) -> None:
        with self._log(name).open("ab") as log:
            # Start the process in a session of its own. Otherwise it would get SIGINT from Ctrl-C,
            # and also SIGTERM from this program.
            self._running[name] = subprocess.Popen(
                [*self._program, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, env={**os.environ, RAY_FOLDER: f"{self._ray.name}/{name}"},
            )  # fmt: skip

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _wait(self, is_done: Callable[[], bool], until: float) -> None:
        """Wait until ``is_done`` returns True.

        Raises
        ------
        EndedError
            If a process ends before that, or the time ``until`` has passed.
        """
        while True:
            for name, process in self._running.items():
                if process.poll() is not None:
                    lines = self._log(name).read_text(errors="replace").splitlines()[-TAIL:]
                    raise EndedError(
                        f"{name} has ended with exit code {process.returncode}:\n"
                        + "\n".join(f"  {line}" for line in lines)
                    )
            if is_done():
                return
            if time.monotonic() > until:
                raise EndedError(f"The cluster was not complete after {START:g} s.")
            time.sleep(LOOK)


def run(folder: Path, head: str, program: Sequence[str]) -> int:
    """Run a cluster until Ctrl-C or SIGTERM; return the exit code."""
    trial = TrialCluster(folder, head, program)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(f"{', '.join(NAMES)} start in {folder}; this takes half a minute.", flush=True)
        trial.start(trial.look)
        print(trial.text(), flush=True)
        trial.watch()
    except EndedError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nThe cluster ends.", flush=True)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        trial.close()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial; return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    try:
        check_ray()
    except GPUPoolError as error:
        print(error, file=sys.stderr)
        return 1
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    head = f"{own_address()}:{port}"
    program = [sys.executable, "-m", "jupyter_gpupool.cli"]
    if words:
        folder = Path(words[0]).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return run(folder, head, program)
    with tempfile.TemporaryDirectory(prefix="gpupool-cluster-") as made:
        return run(Path(made), head, program)


if __name__ == "__main__":
    sys.exit(main())
