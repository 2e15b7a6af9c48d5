# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Compile the guard: ``python -m jupyter_gpupool.guard.build``."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .. import compiling
from ..compiling import Build, CompilerMissing, command_line
from . import _generate as generator

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

__all__ = ["DEFAULT_OUT", "SOURCES", "CompilerMissing", "compile", "compiler", "libraries"]

_HERE = Path(__file__).resolve().parent
SOURCES = _HERE / "src"
ENTRIES = _HERE / "entries.txt"
NVML_ENTRIES = _HERE / "nvml_entries.txt"
#: Where the installed package looks for the libraries.
DEFAULT_OUT = _HERE / "lib"

# A thread's count of nested calls is read at each: no call of __tls_get_addr for it.
_FLAGS = ("-ftls-model=initial-exec",)
# -Bsymbolic: another library may define our names; inside the guard they are ours. nodelete: a
# wait at the gate, a signal handler and the driver outlive a dlclose(). Bound lazily: a process
# that never calls CUDA looks no symbol up.
_LINK = ("-shared", "-Wl,-Bsymbolic", "-Wl,-z,lazy", "-Wl,-z,nodelete", "-Wl,-z,noexecstack")

#: C functions of the guard that serve an entry point, as they are defined.
_WRAP = re.compile(r"\bwrap_(cu\w+)\s*\([^;{}]*\)\s*\{")


def compiler() -> list[str]:
    """Return the command of the C compiler.

    Raises
    ------
    CompilerMissing
        If ``$CC`` or ``cc`` cannot be found, or this machine is not x86-64.
    """
    if platform.machine() != "x86_64":
        raise CompilerMissing(
            f"The guard's entry points are x86-64 assembly, and this machine is "
            f'{platform.machine()}. Use attach = "cell", which needs no guard.'
        )
    return compiling.compiler()


def libraries() -> dict[str, list[Path]]:
    """Return the C sources of each library, by SONAME."""
    return {
        "libcuda.so.1": sorted(SOURCES.glob("*.c")),
        "libnvidia-ml.so.1": [*sorted((SOURCES / "nvml").glob("*.c")), SOURCES / "find.c"],
    }


def _wraps(command: Sequence[str], sources: Sequence[Path], generated: Path) -> set[str]:
    """Return the entry points that have a C function. Asks the preprocessor: macros make some."""
    flags = ["-E", "-P", "-std=gnu11", "-D_GNU_SOURCE", f"-I{generated}", f"-I{SOURCES}"]
    done = subprocess.run(
        [*command, *flags, *map(str, sources)], check=True, stdout=subprocess.PIPE, text=True
    )
    return set(_WRAP.findall(done.stdout))


def _generate(soname: str, sources: Sequence[Path], folder: Path) -> Sequence[str]:
    include = [f"-I{folder}", f"-I{SOURCES}"]
    if soname != "libcuda.so.1":
        for name, text in generator.nvml(NVML_ENTRIES).items():
            (folder / name).write_text(text, encoding="ascii")
        return [*include, str(folder / "nvml_gen.S")]
    entries = generator.read(ENTRIES)
    # The header first, for the preprocessor; it does not depend on which functions there are.
    (folder / "entries_gen.h").write_text(generator.header(entries), encoding="ascii")
    wraps = _wraps(compiler(), sources, folder)
    for name, text in generator.generate(entries, wraps).items():
        (folder / name).write_text(text, encoding="ascii")
    return [*include, str(folder / "entries_gen.S")]


def compile(  # noqa: A001 - the name the package build and the tests call
    out_dir: str | os.PathLike[str] = DEFAULT_OUT,
    *,
    sanitize: str | None = None,
    strict: bool = True,
) -> None:
    """Compile the libraries into ``out_dir``; see :meth:`jupyter_gpupool.compiling.Build.into`.

    Raises
    ------
    CompilerMissing
        If there is no C compiler, or this is not x86-64.
    """
    compiler()
    headers = [*SOURCES.rglob("*.h"), *SOURCES.rglob("*.S"), ENTRIES, NVML_ENTRIES]
    headers += [Path(generator.__file__), Path(__file__)]
    build = Build(libraries(), headers, _FLAGS, _LINK, _generate)
    build.into(out_dir, sanitize=sanitize, strict=strict)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile on the command line; the exit status."""
    return command_line("jupyter_gpupool.guard.build", "The guard", DEFAULT_OUT, compile, argv)


if __name__ == "__main__":
    sys.exit(main())
