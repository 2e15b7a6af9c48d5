# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Reads ``c.GPUPool`` from Jupyter's configuration files, and refuses unknown options."""

from __future__ import annotations

import time
import traceback
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from jupyter_core.paths import jupyter_config_path
from traitlets import TraitError
from traitlets.config import Config
from traitlets.config.loader import (
    ConfigFileNotFound,
    DeferredConfig,
    JSONFileConfigLoader,
    LazyConfigValue,
    PyFileConfigLoader,
)

from ..text import did_you_mean, nearest
from .mistakes import Fault, WrongConfiguration, WrongValue
from .options import GPUPool, fixed_options
from .places import line_of
from .schedules import with_value, wrong_settings
from .settings import EMULATE_VARIABLE, BrokerSettings
from .timetable import Timetable

#: Jupyter Server's own files. In the same folder, a later file wins over an earlier file.
_NAMES = (
    "jupyter_config.py",
    "jupyter_config.json",
    "jupyter_server_config.py",
    "jupyter_server_config.json",
)

#: The sections of this package in a configuration file, and what each configures.
_OURS = {"GPUPool": "the pool", "GPUPoolProvisioner": "the pool's provisioner"}

#: A section's name counts as a misspelling of one of these names if the two names are at least this
#: similar.
_LIKENESS = 0.8

#: The origin of values that win over every file.
_COMMAND_LINE = "the command line"


def load_settings(
    config_files: Sequence[Path] | None = None, overrides: Config | None = None
) -> BrokerSettings:
    """Return the settings of this machine's (or user's) pool while no schedule is in force.

    This is ``base`` of the result of :func:`load_timetable`.
    """
    return load_timetable(config_files, overrides).base


def load_timetable(
    config_files: Sequence[Path] | None = None,
    overrides: Config | None = None,
    *,
    only_given: bool = False,
    now: float | None = None,
) -> Timetable:
    """Return the settings of this machine's (or user's) pool, with the changes by its schedules.

    The function reads values in this order, and later values win. First it reads ``jupyter_config``
    and ``jupyter_server_config`` (``.py``, then ``.json``) in each folder of ``jupyter --paths``,
    from the last listed folder to the first. Then it reads ``config_files``, and at last
    ``overrides``, which are usually from the command line. Only the section ``GPUPool`` counts.
    Unlike Jupyter Server, the function does not search the working directory, because a broker may
    start in a folder of notebooks.

    With ``only_given``, it reads only ``config_files`` and ``overrides``. With or without
    ``only_given``, it checks the settings under all schedules for one year. This year begins at
    ``now`` (seconds since the epoch; None means the present time).

    Raises
    ------
    WrongConfiguration
        For an unreadable file, an unknown name, a bad value, or values that contradict each other,
        with or without a schedule in force. The error names each place, the allowed values, and the
        nearest valid name.
    """
    merged = Config()
    read: list[Path] = []
    faults: list[Fault] = []
    origins: dict[str, str] = {}
    for path, required in [
        *((found, False) for found in (() if only_given else _candidates())),
        *((Path(given), True) for given in config_files or ()),
    ]:
        try:
            config = _read(path, required=required)
        except WrongConfiguration as error:
            faults += error.faults
            continue
        if config is not None:
            faults += wrong_values(config, origin=str(path))
            _note_origins(origins, merged, config, str(path))
            merged.merge(config)
            read.append(path)
    if overrides is not None:
        section = Config({"GPUPool": overrides["GPUPool"]} if "GPUPool" in overrides else {})
        faults += wrong_values(section, origin=_COMMAND_LINE)
        _note_origins(origins, merged, section, _COMMAND_LINE)
        merged.merge(section)
    if faults:
        raise WrongConfiguration(faults)
    places = _Places([str(path) for path in read], origins)
    chosen = GPUPool(config=merged)
    try:
        base = chosen.settings()
    except WrongConfiguration as error:
        raise WrongConfiguration([places.of(fault) for fault in error.faults]) from None
    options = chosen.chosen()
    if base.emulate and "emulate" not in options:
        options["emulate"] = base.emulate
        origins["emulate"] = f"${EMULATE_VARIABLE}"
    about: dict[str, Any] = {"files": tuple(read), "options": options, "origins": origins}

    def make(rules: tuple[int, ...]) -> BrokerSettings:
        """Return the settings while the schedules with the indices ``rules`` are in force."""
        new: dict[str, Any] = {}
        for index in rules:
            for name, value in base.schedules[index].values.items():
                # Take the old value from ``chosen``. In ``merged`` it may be a change that
                # traitlets has not made yet (such as ``append``).
                new[name] = with_value(new.get(name, getattr(chosen, name)), value)
        config = Config({"GPUPool": {**merged.get("GPUPool", {}), **new}})
        found = wrong_values(config)
        if found:
            raise WrongConfiguration(found)
        return replace(GPUPool(config=config).settings(), **about)

    known = GPUPool.class_traits(config=True)
    faults += wrong_settings(base.schedules, known, fixed_options(), base.pool.groups)
    timetable = Timetable(replace(base, **about), make, places.of)
    found = [places.of(fault) for fault in faults] or timetable.faults(
        time.time() if now is None else now
    )
    if found:
        raise WrongConfiguration(found)
    return timetable


class _Places:
    """Finds the file and line where the value of an option is written."""

    def __init__(self, files: Sequence[str], origins: Mapping[str, str]) -> None:
        self._files = files
        self._origins = origins

    def of(self, fault: Fault) -> Fault:
        """Return ``fault`` with its file and line."""
        origin = self._origins.get(fault.option, "")
        if origin == _COMMAND_LINE or not origin:
            return replace(fault, origin=fault.origin or origin)
        return fault.at([*self._files, origin])


def _note_origins(origins: dict[str, str], merged: Config, more: Config, origin: str) -> None:
    """Store ``origin`` for each option whose value in ``more`` differs from that in ``merged``.

    A server passes its whole configuration, including the values that it has read from files. If
    ``merged`` has the same value from a file, the file stays the origin.
    """
    before = merged.get("GPUPool", {})
    for name, value in more.get("GPUPool", {}).items():
        if name not in before or before[name] != value:
            origins[name] = origin


def check_config(config: Config, *, origin: str = "") -> None:
    """Raise an error if ``config``, read from ``origin``, has unknown names or bad values.

    Raises
    ------
    WrongConfiguration
        The error names ``origin``, the option, and what is allowed.
    """
    faults = wrong_values(config, origin=origin)
    if faults:
        raise WrongConfiguration(faults)


def wrong_values(config: Config, *, origin: str = "") -> list[Fault]:
    """Return a fault for each unknown name and each bad value of ``c.GPUPool`` in ``config``."""
    faults = []
    for section in config:
        meant = _meant(section)
        if meant not in ("", section):
            line = line_of(Path(origin), (section,))[1] if origin else None
            place = (f" in {origin}" if origin else "") + (f", line {line}" if line else "")
            text = f"c.{section}{place} is not the name of {_OURS[meant]}."
            faults.append(Fault(text, f"Write c.{meant}.", origin=origin, line=line))
    options = GPUPool.class_traits(config=True)
    found: list[Fault] = []
    for name, value in config.get("GPUPool", {}).items():
        if name not in options:
            hint = did_you_mean(name, options, then="`jupyter gpupool generate-config` lists all.")
            found.append(Fault("there is no such option.", hint, name))
            continue
        try:
            # Check a copy of the value. A value such as ``c.GPUPool.admins.append(...)`` changes
            # when traitlets reads it, and could no longer be merged with values of other files.
            GPUPool(config=Config({"GPUPool": {name: deepcopy(value)}}))
        except (TraitError, ValueError, TypeError) as error:
            example = f"Example: {options[name].metadata['example']}"
            if isinstance(error.__cause__, WrongValue):
                found += [
                    replace(fault, option=name, next_step=fault.next_step or
                            ("" if fault.keys else example))
                    for fault in error.__cause__.faults
                ]  # fmt: skip
            else:
                found.append(Fault(_reason(name, value, error), example, name))
    return faults + [fault.at([origin] if origin else []) for fault in found]


def _reason(name: str, value: Any, error: Exception) -> str:
    """Return why ``value`` is refused: this package's own text, or else the allowed values."""
    option = GPUPool.class_traits()[name]
    text = str(error)
    if isinstance(error, TraitError) and " trait of " not in text:
        return text
    if isinstance(value, DeferredConfig):
        value = value.get_value(option) if not isinstance(error, ValueError) else value
    if isinstance(value, LazyConfigValue):
        unit = option.metadata["unit"]
        return f"the result of this change is not allowed. Allowed: {unit}."
    return f"{value!r} is not allowed. Allowed: {option.metadata['unit']}."


def _candidates() -> Iterator[Path]:
    for folder in reversed(jupyter_config_path()):
        for name in _NAMES:
            yield Path(folder, name)


def _read(path: Path, *, required: bool) -> Config | None:
    loader = (JSONFileConfigLoader if path.suffix == ".json" else PyFileConfigLoader)(
        path.name, path=str(path.parent)
    )
    try:
        config = loader.load_config()
    except ConfigFileNotFound:
        if required:
            raise WrongConfiguration(
                [Fault(f"There is no configuration file {path}.", "Check the path.")]
            ) from None
        return None
    except SystemExit as error:
        text = f"The configuration file {path} ended the program with {error!r}."
        raise WrongConfiguration(
            [Fault(text, "Remove the call that ends the program, such as sys.exit().")]
        ) from None
    except Exception as error:
        text = f"The configuration file {path} cannot be read: {_one_line(error, path)}."
        raise WrongConfiguration([Fault(text, "Correct it; nothing was changed.")]) from error
    # The file may also contain sections of other applications. Keep only this package's sections.
    return Config({name: value for name, value in config.items() if _meant(name)})


def _meant(section: str) -> str:
    """Return which section of this package ``section`` means, even if misspelt; "" if none."""
    near = {name.lower(): name for name in _OURS}
    return near.get(nearest(section.replace("_", "").lower(), near, likeness=_LIKENESS), "")


def _one_line(error: Exception, path: Path) -> str:
    """Return an error as text, with the line of the file at ``path`` that raised it."""
    number = error.lineno if isinstance(error, SyntaxError) else None
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename) == path and not isinstance(error, SyntaxError):
            number = frame.lineno
    line = f", line {number}" if number else ""
    return f"{type(error).__name__}{line}: {' '.join(str(error).split())}"
