# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Read ``c.GPUPool`` from Jupyter's configuration files, and refuse unknown options."""

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

#: Jupyter Server's own files: later ones win over earlier ones in the same folder.
_NAMES = (
    "jupyter_config.py",
    "jupyter_config.json",
    "jupyter_server_config.py",
    "jupyter_server_config.json",
)

#: Our sections of a configuration file, and the class of each.
_OURS = {"GPUPool": "the pool", "GPUPoolProvisioner": "the pool's provisioner"}

#: Least likeness at which a section's name counts as a misspelling of one of our sections.
_LIKENESS = 0.8

#: The origin of values that overrule every file.
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
    """Return the settings of this machine's (or user's) pool at all times.

    It reads these files in this order, and later values win: ``jupyter_config`` and
    ``jupyter_server_config`` (``.py``, then ``.json``) in each folder of ``jupyter --paths``, from
    the last listed to the first; then ``config_files``; then ``overrides``, usually the command
    line's. Only the section ``GPUPool`` counts. Unlike Jupyter Server, this does not search the
    working directory: a broker may start in a folder of notebooks.

    With ``only_given``, ``config_files`` and ``overrides`` alone are read. ``now`` (seconds since
    the epoch) is the beginning of the year for which all schedules are checked.

    Raises
    ------
    WrongConfiguration
        For an unreadable file, an unknown name, a bad value, or values that contradict each other,
        also while a schedule is in force. The error names each place, the allowed values, and the
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
        """Return the settings while these schedules are in force."""
        new: dict[str, Any] = {}
        for index in rules:
            for name, value in base.schedules[index].values.items():
                # ``chosen`` has the final value; the section may only have an addition to another
                # file's value.
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
    """Note ``origin`` for the options that ``more`` changes.

    A server passes on its whole configuration, so a value that a file has too keeps the file's
    name.
    """
    before = merged.get("GPUPool", {})
    for name, value in more.get("GPUPool", {}).items():
        if name not in before or before[name] != value:
            origins[name] = origin


def check_config(config: Config, *, origin: str = "") -> None:
    """Refuse unknown names and bad values of ``c.GPUPool`` in ``config``, read from ``origin``.

    Raises
    ------
    WrongConfiguration
        Naming ``origin``, the option, and what is allowed.
    """
    faults = wrong_values(config, origin=origin)
    if faults:
        raise WrongConfiguration(faults)


def wrong_values(config: Config, *, origin: str = "") -> list[Fault]:
    """Return the unknown names and bad values of ``c.GPUPool`` in ``config``."""
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
            # A copy, because reading a value such as ``c.GPUPool.admins.append(...)`` would end its
            # merging.
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
    """Return the sentence for a bad value: that of our check, else one with the allowed values."""
    option = GPUPool.class_traits()[name]
    text = str(error)
    if isinstance(error, TraitError) and " trait of " not in text:
        return text
    if isinstance(value, DeferredConfig):
        value = value.get_value(option) if not isinstance(error, ValueError) else value
    if isinstance(value, LazyConfigValue):
        return f"this option cannot be changed like that. It takes: {option.metadata['unit']}."
    return f"{value!r} is not allowed. It takes: {option.metadata['unit']}."


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
        text = f"The configuration file {path} ended the program ({error})."
        raise WrongConfiguration([Fault(text)]) from None
    except Exception as error:
        text = f"The configuration file {path} cannot be read: {_one_line(error, path)}."
        raise WrongConfiguration([Fault(text, "Correct it; nothing was changed.")]) from error
    # A file of another application may have any content; only our sections are checked.
    return Config({name: value for name, value in config.items() if _meant(name)})


def _meant(section: str) -> str:
    """Return the name of our section that ``section`` is or misspells; "" if none."""
    near = {name.lower(): name for name in _OURS}
    return near.get(nearest(section.replace("_", "").lower(), near, likeness=_LIKENESS), "")


def _one_line(error: Exception, path: Path) -> str:
    """Return an error as text, with the last line of the file at ``path`` that led to it."""
    number = error.lineno if isinstance(error, SyntaxError) else None
    for frame in traceback.extract_tb(error.__traceback__):
        if Path(frame.filename) == path and not isinstance(error, SyntaxError):
            number = frame.lineno
    line = f", line {number}" if number else ""
    return f"{type(error).__name__}{line}: {' '.join(str(error).split())}"
