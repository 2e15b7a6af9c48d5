# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""MUNGE daemons for tests. Each daemon has its own socket, and several daemons share a key."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.broker.kit import PYTHONPATH, ROOT, remove, short_folder, wait_until

NOBODY = 65534

_DAEMON = shutil.which("munged") or next(
    (str(path) for path in [Path("/usr/sbin/munged")] if path.exists()), ""
)


def has_munge():
    """Return whether this machine can run daemons of MUNGE."""
    return bool(_DAEMON)


@contextmanager
def munge_daemons(*names, keys=None):
    """Run a MUNGE daemon for each name; yield the sockets by name.

    All daemons whose names are not in ``keys`` share one key.
    """
    if not _DAEMON:
        pytest.skip("munged is missing: apt-get install munge")
    folder = short_folder()
    folder.chmod(0o755)  # all users need the sockets
    running, sockets = [], {}
    try:
        for name in names:
            place = folder / name
            place.mkdir(mode=0o755)
            key, log = place / "key", place / "log"
            key.touch(0o600)
            key.write_bytes((keys or {}).get(name, b"the key of the cluster") * 64)
            sockets[name] = str(place / "munge.socket")
            with (place / "output").open("ab") as output:
                running.append(subprocess.Popen(
                    [_DAEMON, "--foreground", "--force", "--num-threads=2", f"--key-file={key}",
                     f"--socket={sockets[name]}", f"--pid-file={place / 'pid'}",
                     f"--log-file={log}", f"--seed-file={place / 'seed'}"],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                ))  # fmt: skip
        for name, path in sockets.items():
            wait_until(lambda path=path: Path(path).exists(), f"the daemon of {name}")
        yield sockets
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(30)
        remove(folder)


_AS = """
import os, sys
from jupyter_gpupool.cluster.munge import Munge
from jupyter_gpupool.errors import RefusedError
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
method, socket, text = sys.argv[1:]
try:
    print(getattr(Munge(socket), method)(text))
except RefusedError as error:
    print(error.code)
"""


def as_nobody(method, socket, text):
    """Call a method of ``Munge`` as ``nobody``; return its result, or the code of a refusal."""
    done = subprocess.run(
        [sys.executable, "-c", _AS, method, socket, text], capture_output=True, text=True,
        timeout=60, cwd=ROOT, env={**os.environ, "PYTHONPATH": PYTHONPATH}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
