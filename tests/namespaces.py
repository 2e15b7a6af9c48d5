# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Linux namespaces like those of containers, made by ``unshare`` of util-linux."""

import subprocess
from functools import lru_cache
from pathlib import Path

#: These words before a command start it in its own PID namespace. If ``unshare`` ends, Linux kills
#: the command.
OWN_NUMBERS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@lru_cache(maxsize=1)
def refusal():
    """Return why this machine refuses namespaces, or ""."""
    try:
        done = subprocess.run(
            [*OWN_NUMBERS, "true"], capture_output=True, text=True, timeout=60, check=False
        )
    except FileNotFoundError:
        return "unshare (util-linux) is not installed"
    return done.stderr.strip()


def child(pid):
    """Return the process id of the only child of ``pid``, as this namespace numbers processes."""
    (number,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(number)
