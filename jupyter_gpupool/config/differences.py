# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Differences between the configuration of a server or command and that of its broker.

One broker serves all servers of a user, with the configuration that it read. A server with another
configuration gets a notice that tells which options differ, where the values in force come from,
and how to change them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from traitlets.config import Config

from ..errors import ConfigError
from ..units import format_bytes
from .loading import load_settings
from .options import GPUPool
from .reading import Seconds, Size
from .settings import BrokerSettings

#: Options whose values name users. A broker shows these options only to its admins.
PRIVATE = ("quotas", "admins", "groups", "schedules")

#: Options that only name the place of the broker. A difference in them changes nothing else, so it
#: is not reported.
_ASIDE = ("socket",)

#: The largest number of options that one sentence names.
_MOST = 4

#: The largest number of characters of a value in a sentence. ``check-config`` shows longer values
#: in full.
_LONGEST = 100


#: Notices that this process has logged.
_LOGGED: set[str] = set()


def not_logged(text: str) -> bool:
    """Return True at the first call with this ``text``, so that the caller logs it only once.

    The result is False if ``text`` is "". Both the provisioner and the server extension may notice
    the same difference.
    """
    if not text or text in _LOGGED:
        return False
    _LOGGED.add(text)
    return True


@dataclass(frozen=True)
class Difference:
    """One option whose value here differs from the broker's.

    The values are texts as in a configuration file.
    """

    option: str
    here: str
    here_from: str
    in_force: str
    in_force_from: str


def shown(settings: BrokerSettings, *, private: bool) -> dict[str, Any]:
    """Return a broker's configuration; if not ``private``, without the options that name users."""
    hidden = [] if private else [*PRIVATE]
    return {
        "options": {k: v for k, v in settings.options.items() if k not in hidden},
        "origins": {k: v for k, v in settings.origins.items() if k not in hidden},
        "hidden": hidden,
    }


def differences(own: BrokerSettings, in_force: Mapping[str, Any]) -> list[Difference]:
    """Return the options for which ``own`` has another value than the broker.

    ``in_force`` is the broker's configuration in the form that :func:`shown` returns.
    """
    options, origins = in_force.get("options") or {}, in_force.get("origins") or {}
    aside = {*_ASIDE, *(in_force.get("hidden") or ())}
    known = GPUPool.class_traits(config=True)
    found = []
    for name in sorted({*own.options, *options} - aside):
        default = _plain(known[name].default()) if name in known else None
        here, there = own.options.get(name, default), options.get(name, default)
        if here != there:
            trait = known.get(name)
            found.append(
                Difference(
                    name,
                    _written(trait, here),
                    own.origins.get(name, "the default"),
                    _written(trait, there),
                    str(origins.get(name, "the default")),
                )
            )
    return found


def notice(
    section: Mapping[str, Any] | None, status: Mapping[str, Any], *, who: str = "This server"
) -> str:
    """Return the notice about different configurations; "" if they agree.

    If the broker serves the whole machine, the notice leaves out options that only the broker's
    configuration sets: the admin may have set them in files of the service, which users' servers do
    not read.

    Parameters
    ----------
    section:
        The caller's own ``c.GPUPool``. Its values win over those in the configuration files.
    status:
        The broker's status, or another answer with the fields ``config`` and ``broker``.
    who:
        The subject of the sentence, such as "This server".
    """
    in_force = status.get("config")
    if not in_force:
        return ""
    try:
        own = load_settings(overrides=Config({"GPUPool": dict(section)}) if section else None)
    except ConfigError as error:
        return (
            f"{who} has a mistake in its configuration, so the pool does not use this "
            f"configuration: {error}"
        )
    found = differences(own, in_force)
    if (status.get("broker") or {}).get("machine_wide"):
        found = [difference for difference in found if difference.option in own.options]
    return sentence(found, status, who=who) if found else ""


def sentence(found: Sequence[Difference], status: Mapping[str, Any], *, who: str) -> str:
    """Return the differences and what to do, as text for people."""
    parts = [
        f"c.GPUPool.{d.option} is {d.in_force} (from {d.in_force_from}), not {d.here} (from "
        f"{d.here_from})"
        for d in found[:_MOST]
    ]
    if len(found) > _MOST:
        parts.append(f"{len(found) - _MOST} more (`jupyter gpupool doctor` lists them)")
    broker = status.get("broker") or {}
    if broker.get("machine_wide"):
        change = "That pool belongs to the whole machine: ask your admin to change its options."
    else:
        change = (
            "To change an option of that pool, edit its configuration and send SIGHUP to its "
            f"broker (process {status.get('pid')}); or shut down all Pooled GPU kernels, wait "
            "until that broker has ended, and start a kernel here."
        )
    return (
        f"{who} joins a GPU pool that runs with another configuration. In force: "
        f"{'; '.join(parts)}. {change}"
    )


def _plain(value: Any) -> Any:
    """Return ``value`` after a round trip through JSON."""
    return json.loads(json.dumps(value, default=str))


def _written(trait: object, value: Any) -> str:
    if isinstance(trait, Size) and isinstance(value, int):
        return format_bytes(value)
    if isinstance(trait, Seconds) and isinstance(value, (int, float)):
        return f"{value:g} s"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
