# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The admin's configuration: ``c.GPUPool.*`` in ``jupyter_server_config.py``.

- ``options``: the traits, the only place for names, units, defaults and examples.
- ``settings``: the frozen :class:`BrokerSettings` that they become, and how they must fit together.
- ``files``: finding, reading and checking Jupyter's configuration files.
- ``quantities``: sizes and durations as traits; how much memory this machine has.
"""

from .files import check_config, load_settings
from .options import GPUPool
from .settings import EMULATE_VARIABLE, BrokerSettings, needs_restart, usable_attach

__all__ = [
    "EMULATE_VARIABLE",
    "BrokerSettings",
    "GPUPool",
    "check_config",
    "load_settings",
    "needs_restart",
    "usable_attach",
]
