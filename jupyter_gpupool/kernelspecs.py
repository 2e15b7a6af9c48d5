# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Make, list and remove pooled twins of installed kernelspecs.

A twin is a copy of a kernelspec. It starts the same kernel through our provisioner. In clients
without provisioners, it starts the kernel through our launcher. All else is as in the original:
files, logos, environment, interrupt mode, metadata. The original does not change.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

from jupyter_client.kernelspec import KernelSpecManager

from .errors import Code, GPUPoolError
from .launcher import LAUNCHER, REMOTE_PROVISIONER, encrypts
from .text import did_you_mean

PROVISIONER = "gpupool-provisioner"

#: jupyter_client's own provisioner, which ours replaces.
LOCAL_PROVISIONER = "local-provisioner"

SUFFIX = " (Pooled GPU)"
REMOTE_SUFFIX = " (Pooled GPU of the cluster)"
_NAME = re.compile(r"^[a-z0-9._-]+$", re.IGNORECASE)  # as in jupyter_client


class KernelSpecError(GPUPoolError):
    """Raised if a kernelspec does not exist, or cannot be wrapped or unwrapped."""

    code = Code.KERNELSPEC


@dataclass(frozen=True)
class PooledKernel:
    """A kernelspec that uses the pool. If it is a twin, ``wraps`` names its original."""

    name: str
    display_name: str
    wraps: str
    path: Path


def list_pooled() -> list[PooledKernel]:
    """Return the installed kernelspecs that use one of our provisioners, sorted by name."""
    found = []
    for name, folder in sorted(KernelSpecManager().find_kernel_specs().items()):
        try:
            spec = _read(Path(folder))
        except KernelSpecError:
            continue  # a broken kernelspec is not listed
        if _provisioner(spec) in (PROVISIONER, REMOTE_PROVISIONER):
            metadata = spec.get("metadata", {}).get("gpupool", {})
            wraps = str(metadata.get("wraps", "")) if isinstance(metadata, dict) else ""
            shown = str(spec.get("display_name", name))
            found.append(PooledKernel(name, shown, wraps, Path(folder)))
    return found


def wrap(
    name: str,
    *,
    user: bool = False,
    prefix: str | None = None,
    remote: bool = False,
    new_name: str | None = None,
    display_name: str | None = None,
) -> Path:
    """Install a pooled twin of kernelspec ``name`` and return its folder.

    Parameters
    ----------
    name:
        As ``jupyter kernelspec list`` shows it.
    user, prefix:
        Where to install it, as for ``jupyter kernelspec install``; system-wide if neither is given.
    remote:
        Whether the cluster chooses the machine for each kernel. That machine must have a kernelspec
        with the same name.
    new_name:
        Default: ``gpupool-<name>``, or ``gpupool-remote-<name>`` with ``remote``.
    display_name:
        Default: the display name of the original, with " (Pooled GPU)" or " (Pooled GPU of the
        cluster)" added.

    Raises
    ------
    KernelSpecError
        If the kernelspec ``name`` does not exist, is already pooled or uses another provisioner.
        With ``remote``, also if its kernel cannot encrypt messages. Also if the new name is the
        name of a kernelspec that is not a twin, or if the folder cannot be written.
    """
    manager = KernelSpecManager()
    folder = _find(manager, name)
    spec = _native_or_read(folder)
    provisioner = _provisioner(spec)
    if provisioner in (PROVISIONER, REMOTE_PROVISIONER):
        raise KernelSpecError(
            f"The kernelspec {name!r} uses the GPU pool already.",
            next_step="`jupyter gpupool list` shows all pooled kernelspecs.",
        )
    if provisioner not in ("", LOCAL_PROVISIONER):
        raise KernelSpecError(
            f"The provisioner {provisioner!r} starts the kernels of the kernelspec {name!r}, but "
            "only kernels that start on this machine can use the GPU pool of this machine.",
            next_step="Wrap a kernelspec that has no kernel_provisioner.",
        )
    if remote:
        _check_encryption(name, spec)
    target = (new_name or f"gpupool-{'remote-' if remote else ''}{name}").lower()
    if not _NAME.match(target):
        raise KernelSpecError(
            f"{target!r} is not a kernelspec name.",
            next_step="Use letters, digits, dots, hyphens and underscores.",
        )
    _refuse_taken(manager, target)
    metadata = dict(spec.get("metadata") or {})
    metadata["kernel_provisioner"] = {
        "provisioner_name": REMOTE_PROVISIONER if remote else PROVISIONER,
        "config": {},
    }
    metadata["gpupool"] = {"wraps": name}
    # Clients without provisioners run our launcher. In other clients, our provisioner removes the
    # launcher from the command. The launcher runs in this environment, even if the kernel itself
    # runs in another environment.
    spec["argv"] = [sys.executable, "-m", LAUNCHER, "--kernel", target, "--", *spec["argv"]]
    spec["metadata"] = metadata
    suffix = REMOTE_SUFFIX if remote else SUFFIX
    spec["display_name"] = display_name or f"{spec.get('display_name', name)}{suffix}"
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / target
        shutil.copytree(folder, copy)
        (copy / "kernel.json").write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8")
        try:
            installed = manager.install_kernel_spec(str(copy), target, user=user, prefix=prefix)
        except OSError as error:
            raise KernelSpecError(
                f"The kernelspec {target!r} could not be written: {error}.",
                next_step="Add --user or --sys-prefix.",
            ) from None
    return Path(installed)


def unwrap(name: str) -> None:
    """Remove the pooled twin ``name``. The original stays.

    Raises
    ------
    KernelSpecError
        If the kernelspec does not exist, or was not made by :func:`wrap`.
    """
    manager = KernelSpecManager()
    folder = _find(manager, name)
    if not _is_twin(_read(folder)):
        twins = [kernel.name for kernel in list_pooled() if kernel.wraps]
        raise KernelSpecError(
            f"`jupyter gpupool wrap` did not make the kernelspec {name!r}, so it is not removed.",
            next_step=f"You can remove: {', '.join(twins)}." if twins else "",
        )
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise KernelSpecError(
            f"The kernelspec {name!r} could not be removed: {error}.",
            next_step="Use an account that may write there.",
        ) from None


def _find(manager: Any, name: str) -> Path:
    specs = manager.find_kernel_specs()
    folder = specs.get(name.lower())
    if folder is None:
        raise KernelSpecError(
            f"There is no kernelspec {name!r}.",
            code=Code.UNKNOWN_KERNELSPEC,
            next_step=did_you_mean(
                name.lower(), specs, then="`jupyter kernelspec list` shows all."
            ),
        )
    return Path(folder)


def _native_or_read(folder: Path) -> dict[str, Any]:
    """Return the kernelspec in ``folder``, also if it is the native kernel's folder.

    If nobody has installed a kernelspec for the native kernel, Jupyter reports a folder of
    ipykernel without a kernel.json. For this folder, the function makes a kernelspec. Its ``argv``
    has the path of this environment's interpreter, so that the twin starts this interpreter even
    if the twin is installed in another environment.
    """
    try:
        from ipykernel.kernelspec import RESOURCES, get_kernel_dict
    except ImportError:
        return _read(folder)
    return dict(get_kernel_dict()) if Path(RESOURCES) == folder else _read(folder)


def _read(folder: Path) -> dict[str, Any]:
    path = folder / "kernel.json"
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KernelSpecError(f"The kernelspec {path} cannot be read: {error}.") from None
    if not isinstance(spec, dict) or not isinstance(spec.get("argv"), list):
        raise KernelSpecError(f"The kernelspec {path} has no argv.")
    return spec


def _provisioner(spec: dict[str, Any]) -> str:
    stanza = (spec.get("metadata") or {}).get("kernel_provisioner") or {}
    return str(stanza.get("provisioner_name", "")) if isinstance(stanza, dict) else ""


def _check_encryption(name: str, spec: Mapping[str, Any]) -> None:
    """Refuse a kernelspec if its kernel cannot encrypt: another machine would refuse each start."""
    if not encrypts(spec):
        raise KernelSpecError(
            f"The kernelspec {name!r} does not say that its kernel can encrypt messages. A kernel "
            "that is used from another machine must encrypt them.",
            code=Code.NO_CURVE,
            next_step='If the kernel can do so, add "supported_encryption": ["curve"] to the '
            "metadata of the kernelspec.",
        )


def _is_twin(spec: dict[str, Any]) -> bool:
    ours = (spec.get("metadata") or {}).get("gpupool")
    return isinstance(ours, dict) and bool(ours.get("wraps"))


def _refuse_taken(manager: Any, target: str) -> None:
    folder = manager.find_kernel_specs().get(target)
    if folder is not None and not _is_twin(_read(Path(folder))):
        raise KernelSpecError(
            f"The kernelspec {target!r} exists already in {folder}, and `jupyter gpupool wrap` did "
            "not make it.",
            next_step="Choose another name with --name.",
        )
