# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The admin's configuration: ``c.GPUPool.*`` in ``jupyter_server_config.py``.

- ``options``: the traits; only this module has their names, units, defaults and examples.
- ``reading``: readers of the options' values: sizes, durations, quotas, devices, paths.
- ``grouping``: reads groups: what each group gets, and who is in it.
- ``tree``: whether groups contradict each other: parents, sizes, and users in several groups.
- ``calendar``: when a rule of a calendar is in force; time zones and summer time.
- ``schedules``: reads schedules: their rules, and the options that they set.
- ``settings``: the frozen :class:`BrokerSettings`, with the values of the options for the broker.
- ``timetable``: the settings at a given time, with the changes of the schedules in force.
- ``accounts``: checks whether the users and Unix groups in the configuration exist.
- ``mistakes``: the mistakes in a configuration, each with its place.
- ``places``: finds the line of a file on which a value is written.
- ``loading``: finds, reads and checks Jupyter's configuration files.
- ``differences``: the notice for a server whose configuration differs from the broker's.
"""

from .loading import check_config, load_settings, load_timetable
from .mistakes import Fault, WrongConfiguration
from .options import GPUPool, fixed_options, needs_restart
from .settings import EMULATE_VARIABLE, BrokerSettings, usable_attach
from .timetable import Timetable

__all__ = [
    "EMULATE_VARIABLE",
    "BrokerSettings",
    "Fault",
    "GPUPool",
    "Timetable",
    "WrongConfiguration",
    "check_config",
    "fixed_options",
    "load_settings",
    "load_timetable",
    "needs_restart",
    "usable_attach",
]
