# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Compile the emulated driver: ``python -m emucuda.build``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_gpupool.compiling import Build, CompilerMissing, command_line, compiler

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

__all__ = ["DEFAULT_OUT", "SOURCES", "CompilerMissing", "compile", "compiler", "libraries"]

SOURCES = Path(__file__).resolve().parent / "src"
#: Where the installed package looks for the libraries.
DEFAULT_OUT = Path(__file__).resolve().parent / "lib"

_SHARED = ("machine.c", "slots.c", "spec.c", "faults.c")
# -Bsymbolic: a library of the same SONAME may be preloaded before this one; its symbols must not
# replace ours inside our own tables. nodelete: the driver's thread outlives a dlclose().
_LINK = ("-shared", "-Wl,-Bsymbolic", "-Wl,-z,now", "-Wl,-z,nodelete")


def libraries() -> dict[str, list[Path]]:
    """Return the sources of each library, by SONAME."""
    shared = [SOURCES / name for name in _SHARED]
    rest = sorted(path for path in SOURCES.glob("*.c") if path not in shared)
    nvml = [path for path in rest if path.name.startswith("nvml")]
    cuda = [path for path in rest if path not in nvml]
    return {"libcuda.so.1": cuda + shared, "libnvidia-ml.so.1": nvml + shared}


def compile(  # noqa: A001 - the name the package build and the tests call
    out_dir: str | os.PathLike[str] = DEFAULT_OUT,
    *,
    sanitize: str | None = None,
    strict: bool = True,
) -> None:
    """Compile both libraries into ``out_dir``; see :meth:`jupyter_gpupool.compiling.Build.into`."""
    build = Build(libraries(), [*SOURCES.glob("*.h")], (), _LINK)
    build.into(out_dir, sanitize=sanitize, strict=strict)
    for soname in libraries():
        alias = Path(out_dir) / soname.removesuffix(".1")
        if not alias.is_symlink():
            alias.unlink(missing_ok=True)
            alias.symlink_to(soname)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile on the command line; the exit status."""
    module = "emucuda.build"
    return command_line(module, "The emulated driver", DEFAULT_OUT, compile, argv)


if __name__ == "__main__":
    sys.exit(main())
