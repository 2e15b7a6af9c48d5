# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The files that every container gets. They are made once, then linked into each user's folder.

The links are hard links, so the files of a thousand users need no more memory than those of one
user. To replace a file, this module renames a new file to its path. So a starting kernel finds
either the old file or the new file, and both are complete.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Mapping

from ..guard.install import FOLDER, LIBRARIES, library

#: The name of the folder with these files. The folder is in the same folder as the socket.
NAME = "inside"

_PACKAGE = Path(__file__).resolve().parents[1]

#: Parts of the package that no container needs.
_NOT_INSIDE = frozenset({"labextension", "__pycache__", "src"})

_KERNEL = Path("share/jupyter/kernels/gpupool-python3/kernel.json")


class Content:
    """The files for the containers of a broker.

    ``socket`` is the path of the broker's socket, on the machine and in the containers.
    ``emulated`` is the folder of the emulated driver's libraries, if the GPUs are emulated.
    """

    def __init__(self, socket: Path, emulated: Path | None = None) -> None:
        self._emulated = emulated
        #: The folder of the files in a container.
        self.folder = socket.parent / NAME
        #: ``guard``: the folder of the guard's libraries in a container. ``driver``: the folder of
        #: the emulated driver's libraries in a container.
        self.guard, self.driver = self.folder / FOLDER, self.folder / "emulated"

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return ``environment`` as the variables of a kernel in a container.

        If the GPUs are emulated, the result has the folder of the emulated driver's libraries.
        """
        paths = {"LD_LIBRARY_PATH": str(self.driver)} if self._emulated is not None else {}
        return {**environment, **paths}

    def make(self, folder: Path) -> None:
        """Put all files into ``folder``; a file that is already right stays.

        Raises
        ------
        OSError, GPUPoolError
            If a file cannot be made, or there is no guard.
        """
        library()  # raises GuardMissing if there is no guard
        for source, name in self._copied():
            target = folder / name
            if not _same(source, target):
                with _instead_of(target) as new:
                    shutil.copy2(source, new)
                    new.chmod(0o644)
        _write(folder / _KERNEL, json.dumps(self._kernelspec(), indent=1))
        for soname in LIBRARIES:
            for name in (soname, soname.removesuffix(".1")):
                to = Path("python", _PACKAGE.name, "guard", "lib", soname)
                if (folder / to).exists() and not (folder / FOLDER / name).is_symlink():
                    with _instead_of(folder / FOLDER / name) as new:
                        new.symlink_to(Path("..", to))

    def link(self, made: Path, folder: Path) -> None:
        """Link all files of the folder ``made``, which :meth:`make` has filled, into ``folder``.

        Raises
        ------
        OSError
            If a file cannot be linked.
        """
        for path in _files(made):
            target = folder / path.relative_to(made)
            if path.is_symlink():
                if not target.is_symlink():
                    with _instead_of(target) as new:
                        new.symlink_to(path.readlink())
            elif not (target.exists() and target.samefile(path)):
                with _instead_of(target) as new:
                    new.hardlink_to(path)

    def _copied(self) -> Iterator[tuple[Path, str]]:
        for path in _files(_PACKAGE):
            if path.suffix in (".py", ".1", ".yaml"):
                name = path.relative_to(_PACKAGE.parent)
                yield path, f"python/{name}"
        yield Path(__file__).with_name("start.py"), "start.py"
        if self._emulated is not None:
            for path in sorted(self._emulated.iterdir()):
                yield path, f"{self.driver.name}/{path.name}"

    def _kernelspec(self) -> dict[str, object]:
        return {
            "argv": ["python", str(self.folder / "start.py"), "-f", "{connection_file}"],
            "display_name": "Pooled GPU",
            "language": "python",
            # The kernelspec names no provisioner, because the image may not have the provisioner of
            # this package. Instead, the program ``start`` opens the session.
            "metadata": {"debugger": True, "supported_encryption": ["curve"]},
        }


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files below ``folder`` that containers need."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if path.name not in _NOT_INSIDE:
                yield from _files(path)
        else:
            yield path


def _same(source: Path, target: Path) -> bool:
    try:
        old = target.stat()
    except OSError:
        return False
    new = source.stat()
    return (old.st_size, old.st_mtime_ns) == (new.st_size, new.st_mtime_ns)


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        with _instead_of(path) as new:
            new.write_text(text)
            new.chmod(0o644)


@contextmanager
def _instead_of(path: Path) -> Iterator[Path]:
    """Yield a path for a new file. After the ``with`` block, the new file replaces ``path``."""
    for folder in [*reversed(path.parents)]:
        if not folder.exists():
            folder.mkdir()
            folder.chmod(0o755)
    new = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
