# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Compile the guard: ``python -m jupyter_gpupool.guard.build``.

The package build runs this module before it installs the package's dependencies. So the module
needs only a C compiler (``$CC``, or ``cc``), libc's headers and Python's standard library.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Sequence

from . import _generate as generator

_HERE = Path(__file__).resolve().parent
SOURCES = _HERE / "src"
ENTRIES = _HERE / "entries.txt"
NVML_ENTRIES = _HERE / "nvml_entries.txt"
#: The folder in which the installed package looks for the libraries.
DEFAULT_OUT = _HERE / "lib"

# -ftls-model=initial-exec: each guarded call reads a counter of its thread. With this model, the
# read needs no call of __tls_get_addr.
_FLAGS = (
    *("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g1", "-Wall", "-Wextra"),
    *("-fPIC", "-fvisibility=hidden", "-pthread", "-ftls-model=initial-exec"),
)
# -Bsymbolic: the guard must call its own functions, although another library may define the same
# names. nodelete: the library must stay loaded after a dlclose(). The signal handler, the driver
# and threads that wait at the gate may still use the library. lazy: a process that never calls CUDA
# resolves no symbol.
_LINK = (
    "-shared",
    "-Wl,-Bsymbolic",
    "-Wl,-z,lazy",
    "-Wl,-z,nodelete",
    "-Wl,-z,noexecstack",
    "-ldl",
)

#: Matches the definition of a C function ``wrap_<symbol>``, which serves the entry point
#: ``<symbol>``.
_WRAP = re.compile(r"\bwrap_(cu\w+)\s*\([^;{}]*\)\s*\{")


class CompilerMissing(RuntimeError):
    """The machine has no C compiler, or a processor that the sources do not support."""


def compiler() -> list[str]:
    """Return the command of the C compiler: ``$CC``, or ``cc``.

    Raises
    ------
    CompilerMissing
        If the compiler is not on PATH, or this machine is not x86-64.
    """
    if platform.machine() != "x86_64":
        raise CompilerMissing(
            f"The guard's entry points are x86-64 assembly, and this machine is "
            f'{platform.machine()}. Use attach = "cell", which needs no guard.'
        )
    command = shlex.split(os.environ.get("CC", "cc")) or ["cc"]
    if shutil.which(command[0]) is None:
        raise CompilerMissing(
            f"No C compiler: {command[0]!r} is not on PATH. Install gcc or clang, or set CC."
        )
    return command


def libraries() -> dict[str, list[Path]]:
    """Return the C sources of each library, by SONAME."""
    return {
        "libcuda.so.1": sorted(SOURCES.glob("*.c")),
        "libnvidia-ml.so.1": [*sorted((SOURCES / "nvml").glob("*.c")), SOURCES / "find.c"],
    }


def _wraps(command: Sequence[str], sources: Sequence[Path], generated: Path) -> set[str]:
    """Preprocess the sources; return the entry points for which they define a C function."""
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
    # Write the header first, because the preprocessor needs it to find the C functions.
    (folder / "entries_gen.h").write_text(generator.header(entries), encoding="ascii")
    wraps = _wraps(compiler(), sources, folder)
    for name, text in generator.generate(entries, wraps).items():
        (folder / name).write_text(text, encoding="ascii")
    return [*include, str(folder / "entries_gen.S")]


def compile(  # noqa: A001 - the name that the package build and the tests call
    out_dir: str | os.PathLike[str] = DEFAULT_OUT,
    *,
    sanitize: str | None = None,
    strict: bool = True,
) -> None:
    """Compile each library in ``out_dir`` that is missing or older than its sources.

    ``sanitize`` may be ``"address"`` or ``"thread"`` to instrument the libraries. A program that
    loads instrumented libraries must preload the sanitizer's runtime. With ``strict``, a warning is
    an error. Do not use ``strict`` on a user's machine, because a newer compiler may have new
    warnings.

    Raises
    ------
    CompilerMissing
        If this machine has no C compiler, or is not x86-64.
    subprocess.CalledProcessError
        If compiling fails. The compiler has written the reason to standard error.
    """
    command = [*compiler(), *_FLAGS, *(["-Werror"] if strict else [])]
    if sanitize:
        command += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-O1"]
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    directory = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # several test runs may start at once
        for soname, sources in libraries().items():
            _compile(out / soname, sources, command)
    finally:
        os.close(directory)


def _compile(target: Path, sources: Sequence[Path], command: Sequence[str]) -> None:
    inputs = [*sources, *SOURCES.rglob("*.h"), *SOURCES.rglob("*.S"), ENTRIES, NVML_ENTRIES]
    inputs += [Path(generator.__file__), Path(__file__)]
    newest = max(path.stat().st_mtime_ns for path in inputs)
    if target.exists() and target.stat().st_mtime_ns >= newest:
        return
    # Compile to a temporary name and then rename: a process may be using the old file.
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    link = [*_LINK, f"-Wl,-soname,{target.name}", "-o", str(aside)]
    with tempfile.TemporaryDirectory(prefix="gpupool-build-") as folder:
        generated = _generate(target.name, sources, Path(folder))
        try:
            subprocess.run([*command, *generated, *map(str, sources), *link], check=True)
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile as the command line asks; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jupyter_gpupool.guard.build")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="directory to compile into")
    parser.add_argument(
        "--sanitize", choices=("address", "thread"), help="instrument the libraries (for tests)"
    )
    options = parser.parse_args(argv)
    try:
        compile(options.out, sanitize=options.sanitize, strict=False)
    except CompilerMissing as error:
        print(error, file=sys.stderr)
    except subprocess.CalledProcessError as error:
        print(f"The C compiler failed with status {error.returncode}.", file=sys.stderr)
    except OSError as error:
        print(f"{options.out} cannot be written ({error}). Choose another --out.", file=sys.stderr)
    else:
        print(f"The guard is in {options.out}")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
