# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool``: see the pool, act on it, check it.

- ``commands``: the commands, their options, exit codes; the only place that prints errors.
  ``registry``: how a function becomes one. ``program_commands``: for programs;
  ``cluster_commands``: for several machines; ``leaving``: a machine leaves its cluster or comes
  back; ``cluster_status``: all machines in ``status`` and ``why``.
- ``status`` prints the broker's snapshot; ``picture`` draws it as text and is pure.
- ``top``: the sessions on a screen, and keys that give orders; ``top_table`` and ``top_keys`` are
  pure.
- ``install_devices``: NVIDIA's packages in an environment of their own.
- ``install_service``: the machine's service; ``service_files`` (pure): the files of that service;
  ``root_paths``: whether only root can change a path.
- ``doctor``, ``checks``: what works here and what does not. ``maintenance``: pause, drain, resume.
  ``inside``: what a container must allow.
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
