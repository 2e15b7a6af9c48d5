# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The admin's configuration: ``c.GPUPool.*`` in ``jupyter_server_config.py``.

- ``options``: the traits, the only place for names, units, defaults and examples.
- ``reading``: how their values are read: sizes, durations, quotas, devices, paths.
- ``settings``: the frozen :class:`BrokerSettings` that they become.
- ``loading``: finding, reading and checking Jupyter's configuration files.
- ``differences``: what to tell a server whose configuration is not the broker's.
"""

from .loading import check_config, load_settings
from .options import GPUPool, fixed_options, needs_restart
from .settings import EMULATE_VARIABLE, BrokerSettings, usable_attach

__all__ = [
    "EMULATE_VARIABLE",
    "BrokerSettings",
    "GPUPool",
    "check_config",
    "fixed_options",
    "load_settings",
    "needs_restart",
    "usable_attach",
]
