# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Read ``c.GPUPool`` from Jupyter's configuration files, and refuse unknown options."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator, Sequence

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

from ..errors import ConfigError
from ..text import did_you_mean, nearest
from .options import GPUPool
from .settings import EMULATE_VARIABLE, BrokerSettings, refuse

#: Jupyter Server's own files: later ones win over earlier ones in the same folder.
_NAMES = (
    "jupyter_config.py",
    "jupyter_config.json",
    "jupyter_server_config.py",
    "jupyter_server_config.json",
)

#: Our sections of a configuration file, and the class of each.
_OURS = {"GPUPool": "the pool", "GPUPoolProvisioner": "the pool's provisioner"}

#: Similarity from which a section's name counts as a misspelling of one of ours.
_LIKENESS = 0.8


def load_settings(
    config_files: Sequence[Path] | None = None, overrides: Config | None = None
) -> BrokerSettings:
    """Return the settings of this machine's (or user's) pool.

    Read in this order, later values win: ``jupyter_config`` and ``jupyter_server_config``
    (``.py``, then ``.json``) in each folder of ``jupyter --paths``, the one listed last first;
    then ``config_files``; then ``overrides``, usually the command line's. Only the section
    ``GPUPool`` counts. Unlike Jupyter Server, this does not search the working directory: a broker
    may start in a folder of notebooks.

    Raises
    ------
    ConfigError
        For an unreadable file, an unknown name, a bad value, or values that contradict each other;
        it names the file, what is allowed, and the nearest valid name.
    """
    merged = Config()
    read: list[Path] = []
    origins: dict[str, str] = {}
    for path, required in [
        *((found, False) for found in _candidates()),
        *((Path(given), True) for given in config_files or ()),
    ]:
        config = _read(path, required=required)
        if config is not None:
            check_config(config, origin=str(path))
            _note_origins(origins, merged, config, str(path))
            merged.merge(config)
            read.append(path)
    if overrides is not None:
        section = Config({"GPUPool": overrides["GPUPool"]} if "GPUPool" in overrides else {})
        check_config(section, origin="the command line")
        _note_origins(origins, merged, section, "the command line")
        merged.merge(section)
    chosen = GPUPool(config=merged)
    settings = chosen.settings()
    options = chosen.chosen()
    if settings.emulate and "emulate" not in options:
        options["emulate"] = settings.emulate
        origins["emulate"] = f"${EMULATE_VARIABLE}"
    return replace(settings, files=tuple(read), options=options, origins=origins)


def _note_origins(origins: dict[str, str], merged: Config, more: Config, origin: str) -> None:
    """Note ``origin`` for the options that ``more`` changes.

    A server passes on all that it has read: a value that is also in a file keeps the file's name.
    """
    before = merged.get("GPUPool", {})
    for name, value in more.get("GPUPool", {}).items():
        if name not in before or before[name] != value:
            origins[name] = origin


def check_config(config: Config, *, origin: str = "") -> None:
    """Refuse unknown names and bad values of ``c.GPUPool`` in ``config``, read from ``origin``.

    Raises
    ------
    ConfigError
        Naming ``origin``, the option, and what is allowed.
    """
    for section in config:
        meant = _meant(section)
        if meant not in ("", section):
            place = f" in {origin}" if origin else ""
            raise ConfigError(
                f"c.{section}{place} is not the name of {_OURS[meant]}.",
                next_step=f"Write c.{meant}.",
            )
    if "GPUPool" not in config:
        return
    options = GPUPool.class_traits(config=True)
    for name, value in config["GPUPool"].items():
        if name not in options:
            refuse(
                name,
                "there is no such option.",
                origin=origin,
                next_step=did_you_mean(
                    name, options, then="`jupyter gpupool generate-config` lists all."
                ),
            )
        try:
            # A copy: a read of ``c.GPUPool.admins.append(...)`` itself would end its merging.
            GPUPool(config=Config({"GPUPool": {name: deepcopy(value)}}))
        except (TraitError, ValueError, TypeError) as error:
            reason = _reason(name, value, error)
            refuse(
                name,
                reason,
                origin=origin,
                next_step=f"Example: {options[name].metadata['example']}",
            )


def _reason(name: str, value: Any, error: Exception) -> str:
    """Return the sentence for a bad value: from our check, else what the option allows."""
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
            raise ConfigError(
                f"There is no configuration file {path}.", next_step="Check the path."
            ) from None
        return None
    except SystemExit as error:
        raise ConfigError(f"The configuration file {path} ended the program ({error}).") from None
    except Exception as error:
        raise ConfigError(
            f"The configuration file {path} cannot be read: {_one_line(error)}.",
            next_step="Correct it; nothing was changed.",
        ) from error
    # A file of another application may have any content; only our sections are checked.
    return Config({name: value for name, value in config.items() if _meant(name)})


def _meant(section: str) -> str:
    """Return our section that ``section`` names or misspells; "" if none."""
    near = {name.lower(): name for name in _OURS}
    return near.get(nearest(section.replace("_", "").lower(), near, likeness=_LIKENESS), "")


def _one_line(error: Exception) -> str:
    line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
    return f"{type(error).__name__}{line}: {' '.join(str(error).split())}"
