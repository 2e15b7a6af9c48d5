# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool``: the commands to see the pool, to act on it, and to check it.

- ``commands``: the commands, their options and exit codes. No other module prints errors.
  ``registry``: how a function becomes a command. ``program_commands``: commands for programs.
  ``cluster_commands``: commands for a cluster of machines; ``leaving``: a machine leaves its
  cluster or comes back; ``cluster_status``: prints all machines of the cluster.
- ``status`` prints the broker's snapshot; ``picture`` (pure) draws the snapshot as text.
- ``top``: shows the sessions as a full-screen table; its keys send orders to the broker.
  ``top_table`` and ``top_keys`` are pure.
- ``install_devices``: installs NVIDIA's packages in a separate environment.
- ``install_service``: installs the machine's service; ``service_files`` (pure): the files of that
  service; ``root_paths``: whether only root can change a path.
- ``doctor`` and ``checks``: check what works on this machine. ``inside``: checks in a container.
  ``maintenance``: the orders pause, drain and resume.
- ``check_config``, ``config_report``: what a configuration means, and all its mistakes.
- ``configtext``: a commented configuration file from the options.

Exit codes: 0 done, 1 a problem or a refusal, 2 wrong usage.
"""

from __future__ import annotations

from typing import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``jupyter gpupool`` with ``argv`` (default: the command line); return the exit code."""
    from .commands import run

    return run(argv)
