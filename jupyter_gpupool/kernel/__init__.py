# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The agent inside the kernel process, an IPython extension.

The agent needs only the standard library and IPython.

The provisioner loads the agent with ``--IPKernelApp.extra_extensions=jupyter_gpupool.kernel``. If
the kernel's environment does not have this package, the provisioner makes the agent importable
there.

- ``agent``: puts the parts below into the kernel
- ``link``: the session with its connection, its lease and its holds (``holds``); ``revive``
  restarts the broker
- ``guard_state``: whether the guard is in this process, and the data of the session's page
- ``cells``: the gate in front of each cell; ``waits``: the line that a wait shows, and the
  interrupt that ends it; ``ways``: what the user can do about a wait
- ``call_waits``: what a running cell shows while its calls wait, and when it was preempted
- ``frameworks``: visible devices, memory caps; ``jax_backends``: lets JAX look for the GPU again;
  ``advice``: the line under an error
- ``command``, ``magic``, ``magic_display``: the magic ``%gpu``
"""

from __future__ import annotations

from typing import Any

_agents: dict[int, Any] = {}


def load_ipython_extension(shell: Any) -> None:
    """Load the agent into ``shell``. Called by IPython."""
    from .agent import Agent

    if id(shell) not in _agents:
        agent = _agents[id(shell)] = Agent(shell)
        agent.load()


def unload_ipython_extension(shell: Any) -> None:
    """Take the agent out of ``shell``. Called by ``%unload_ext``."""
    agent = _agents.pop(id(shell), None)
    if agent is not None:
        agent.unload()
