# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool node``: makes a machine join a cluster.

The program starts a raylet and an agent, and watches both. The raylet has no GPU and accepts no
work except the ledger: Ray only carries messages and restarts the ledger. When the raylet ends,
this program ends, too, and its service restarts it. When the agent ends (for example after 30 s
without an answer of the ledger), this program restarts the agent.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from socket import gethostname

from ..config import load_settings
from ..deadlines import within
from ..endpoint import find_socket
from ..errors import Code, RefusedError
from .desk import TTL

_LOG = logging.getLogger(__name__)

#: With Ray's defaults, Ray notices a dead machine after 14 s and a hung one after 64 s. With these
#: values it notices them after 3 s and 6 s.
HEALTH = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}

#: Bytes of Ray's object store. The pool stores nothing there.
STORE = 100_000_000

#: The variable that names Ray's folder for sockets and logs. Without it, every machine uses the
#: path of the head's folder. Two raylets that start in one folder at the same time choose the same
#: names for their sockets. So if one host runs two machines of a cluster, each needs its own
#: folder.
RAY_FOLDER = "RAY_TMPDIR"

#: Seconds in which raylet and agent must end.
PATIENCE = 8.0

#: For ``prctl``: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1

#: Seconds between the end of an agent and its restart.
AGAIN = 1.0


def check_ray() -> None:
    """Refuse to run without Ray.

    Raises
    ------
    RefusedError
        If Ray is not installed. The error names the command that installs Ray.
    """
    if importlib.util.find_spec("ray") is None:
        raise RefusedError(
            "This environment has no Ray, which carries the messages of a cluster.",
            code=Code.REFUSED,
            next_step="Install it in an environment of its own: "
            "pip install 'jupyter_gpupool[cluster]'.",
        )


def token_environment(path: Path, *, create: bool) -> dict[str, str]:
    """Return environment variables: with them, Ray refuses connections without the token.

    ``path`` is the file with the token; with ``create``, this function makes the file if necessary.
    """
    if create and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
        path.write_text(secrets.token_hex(32))
    if not path.is_file():
        raise RefusedError(
            f"There is no file {path} with the cluster's token.",
            code=Code.REFUSED,
            next_step="Copy it from the head, and let only this user read it.",
        )
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path.resolve())}


def raylet_command(join: str, port: int, name: str) -> list[str]:
    """Return the raylet's command; without ``join``, the raylet is the head of the cluster."""
    where = [f"--address={join}"] if join else ["--head", f"--port={port}",
                                                "--include-dashboard=false"]  # fmt: skip
    if folder := os.environ.get(RAY_FOLDER):
        where.append(f"--temp-dir={Path(folder).absolute()}")
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", *where, "--block",
        "--num-gpus=0", "--num-cpus=1", f"--object-store-memory={STORE}",
        "--resources=" + json.dumps({"gpupool": 1}), "--labels", f"gpupool-node={name}",
        "--disable-usage-stats", "--dashboard-agent-listen-port=0", "--metrics-export-port=0",
        # Ray's log monitor sends the output of processes to Ray's drivers. The drivers of this
        # package do not read it.
        "--include-log-monitor=false",
    ]  # fmt: skip


async def run_node(
    *,
    join: str,
    port: int,
    broker: str,
    config: Sequence[Path],
    token: Path,
    ttl: float = TTL,
    interval: float = 2.0,
) -> int:
    """Run a machine of a cluster until SIGTERM; return the exit code."""
    check_ray()
    settings = load_settings(config)
    name = settings.cluster_node or gethostname()
    if name not in settings.cluster_nodes:
        raise RefusedError(
            f"The name of this machine is {name}, and c.GPUPool.cluster_nodes does not have this "
            "name.",
            code=Code.REFUSED,
            next_step="On every machine, add the name to c.GPUPool.cluster_nodes. Or set "
            "c.GPUPool.cluster_node on this machine to a name that is in that list.",
        )
    socket = Path(broker) if broker else find_socket(settings.socket)
    env = {**os.environ, **HEALTH, **token_environment(token, create=not join)}
    command = raylet_command(join, port, name)
    raylet = await asyncio.create_subprocess_exec(*command, env=env, preexec_fn=_die_with_parent)
    agent_command = [
        sys.executable, "-m", "jupyter_gpupool.cluster.ray_agent",
        "--address", join or f"{own_address()}:{port}",
        "--broker", str(socket), "--ttl", str(ttl), "--interval", str(interval),
        *(word for path in config for word in ("--config", str(path))),
    ]  # fmt: skip
    keeper = asyncio.ensure_future(_keep(agent_command, env))
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    died = asyncio.ensure_future(raylet.wait())
    asked = asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait((died, asked), return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            _LOG.error("The raylet of this machine has ended (%s)", raylet.returncode)
        return 1 if died.done() else 0
    finally:
        keeper.cancel()
        with suppress(asyncio.CancelledError):
            await keeper
        await _end(raylet)


def _die_with_parent() -> None:
    """Make this process end when its parent ends, even if the parent was killed.

    Otherwise, if this program is killed and starts again, its old raylet and its old agent continue
    beside the new ones. If two agents request reports from one broker, the broker refuses the
    request of the first agent.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process with SIGTERM, or with SIGKILL if it has not ended after :data:`PATIENCE`."""
    if process.returncode is None:
        process.terminate()
        try:
            await within(process.wait(), PATIENCE)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()


def own_address() -> str:
    """Return the address at which the other machines reach this machine."""
    import ray

    found: str = ray.util.get_node_ip_address()
    return found


async def _keep(command: Sequence[str], env: dict[str, str]) -> None:
    """Run the agent, and restart it whenever it ends."""
    while True:
        agent = await asyncio.create_subprocess_exec(*command, env=env, preexec_fn=_die_with_parent)
        try:
            code = await agent.wait()
        except asyncio.CancelledError:
            await _end(agent)
            raise
        _LOG.warning("The agent of this machine has ended (%s); it is started again", code)
        await asyncio.sleep(AGAIN)
