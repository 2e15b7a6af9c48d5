# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Compile the emulated driver: ``python -m jupyter_gpupool.emulator.build``.

Needs only a C compiler (``$CC``, or ``cc``) and libc's headers. Also run by the package build,
which imports this file by its path: standard library only, nothing from this package.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SOURCES = Path(__file__).resolve().parent / "src"
#: Where the installed package looks for the libraries.
DEFAULT_OUT = Path(__file__).resolve().parent / "lib"

_SHARED = ("machine.c", "slots.c", "spec.c", "faults.c")
_FLAGS = (
    "-std=gnu11",
    "-D_GNU_SOURCE",
    "-O2",
    "-g1",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
)
# -Bsymbolic: a library of the same SONAME may be preloaded before this one; its symbols must not
# replace ours inside our own tables. nodelete: the driver's thread outlives a dlclose().
_LINK = ("-shared", "-Wl,-Bsymbolic", "-Wl,-z,now", "-Wl,-z,nodelete")


class CompilerMissing(RuntimeError):
    """There is no C compiler to call."""


def compiler() -> list[str]:
    """Return the command of the C compiler.

    Raises
    ------
    CompilerMissing
        If ``$CC`` or ``cc`` cannot be found.
    """
    command = shlex.split(os.environ.get("CC", "cc")) or ["cc"]
    if shutil.which(command[0]) is None:
        raise CompilerMissing(
            f"No C compiler: {command[0]!r} is not on PATH. Install gcc or clang, or set CC."
        )
    return command


def libraries() -> dict[str, list[Path]]:
    """Return the sources of each library, by SONAME."""
    shared = [SOURCES / name for name in _SHARED]
    rest = sorted(path for path in SOURCES.glob("*.c") if path not in shared)
    nvml = [path for path in rest if path.name.startswith("nvml")]
    cuda = [path for path in rest if path not in nvml]
    return {"libcuda.so.1": cuda + shared, "libnvidia-ml.so.1": nvml + shared}


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep concurrent test runs from compiling over one another."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _stale(target: Path, sources: Sequence[Path]) -> bool:
    if not target.exists():
        return True
    newest = max(path.stat().st_mtime_ns for path in [*sources, *SOURCES.glob("*.h")])
    return target.stat().st_mtime_ns < newest


def compile(  # noqa: A001 - the name the package build and the tests call
    out_dir: str | os.PathLike[str] = DEFAULT_OUT,
    *,
    sanitize: str | None = None,
    strict: bool = True,
) -> None:
    """Compile both libraries into ``out_dir``, if the sources are newer than what is there.

    ``sanitize`` is ``"address"`` or ``"thread"``: instrumented libraries, for which the program
    that loads them must preload the sanitizer's runtime. ``strict`` makes warnings errors, which
    is right for developers and wrong where a later compiler warns of something new.

    Raises
    ------
    CompilerMissing
        If there is no C compiler.
    subprocess.CalledProcessError
        If compiling fails; the compiler has said why on standard error.
    """
    command = compiler()
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    extra = ["-Werror"] if strict else []
    if sanitize:
        extra += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"]
    with _alone(out):
        for soname, sources in libraries().items():
            target = out / soname
            if _stale(target, sources):
                # Compiled aside and renamed: a process may be running on the old file.
                temporary = out / f".{soname}.{os.getpid()}"
                names = [str(path) for path in sources]
                link = [*_LINK, f"-Wl,-soname,{soname}", "-o", str(temporary)]
                try:
                    subprocess.run([*command, *_FLAGS, *extra, *names, *link], check=True)
                    temporary.replace(target)
                finally:
                    temporary.unlink(missing_ok=True)
            alias = out / soname.removesuffix(".1")
            if not alias.is_symlink():
                alias.unlink(missing_ok=True)
                alias.symlink_to(soname)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile on the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jupyter_gpupool.emulator.build")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="directory to compile into")
    parser.add_argument(
        "--sanitize", choices=("address", "thread"), help="instrument the libraries (for tests)"
    )
    options = parser.parse_args(argv)
    try:
        compile(options.out, sanitize=options.sanitize)
    except CompilerMissing as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"The C compiler failed with status {error.returncode}.", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{options.out} cannot be written ({error}). Choose another --out.", file=sys.stderr)
        return 1
    print(f"The emulated driver is in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
