# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The admin's configuration: ``c.GPUPool.*`` in ``jupyter_server_config.py``.

- ``options``: the traits, the only place for names, units, defaults and examples.
- ``reading``: readers of their values: sizes, durations, quotas, devices, paths.
- ``settings``: the frozen :class:`BrokerSettings` that they become.
- ``loading``: finding, reading and checking Jupyter's configuration files.
- ``differences``: the notice to a server whose configuration differs from the broker's.
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
