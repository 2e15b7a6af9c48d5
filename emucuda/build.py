# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Compile the driver: ``python -m emucuda.build``. This needs a C compiler and libc's headers."""

from __future__ import annotations

import argparse
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Collection, Sequence

SOURCES = Path(__file__).resolve().parent / "src"
#: Where the installed package looks for the libraries.
DEFAULT_OUT = Path(__file__).resolve().parent / "lib"

_SHARED = ("machine.c", "slots.c", "spec.c", "faults.c")
_FLAGS = (
    *("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-g1", "-Wall", "-Wextra"),
    *("-fPIC", "-fvisibility=hidden", "-pthread"),
)
# A process may preload another library with the same SONAME. With -Bsymbolic, the tables of this
# library still point to its own functions. The driver's thread still runs after a dlclose(). With
# nodelete, the code of this thread stays in memory.
_LINK = ("-shared", "-Wl,-Bsymbolic", "-Wl,-z,now", "-Wl,-z,nodelete", "-ldl", "-lm")


class CompilerMissing(RuntimeError):
    """The machine has no C compiler."""


def compiler() -> list[str]:
    """Return the command of the C compiler: ``$CC``, or ``cc``.

    Raises
    ------
    CompilerMissing
        If the compiler is not on PATH.
    """
    command = shlex.split(os.environ.get("CC", "cc")) or ["cc"]
    if shutil.which(command[0]) is None:
        raise CompilerMissing(
            f"No C compiler: {command[0]!r} is not on PATH. Install gcc or clang, or set CC."
        )
    return command


#: For each runtime library, by SONAME, the extra flags of its compilation. There is one library for
#: each supported version of CUDA. Programs look up its symbols with a symbol version: the SONAME.
_RUNTIMES = {f"libcudart.so.{major}": [f"-DRUNTIME={major}"] for major in (12, 13)}
_VERSIONED = "-Wl,--default-symver"


def libraries() -> dict[str, list[Path]]:
    """Return the sources of each library, by SONAME."""
    shared = [SOURCES / name for name in _SHARED]
    rest = sorted(path for path in SOURCES.glob("*.c") if path not in shared)
    nvml = [path for path in rest if path.name.startswith("nvml")]
    cuda = [path for path in rest if path not in nvml]
    runtime = sorted((SOURCES / "cudart").glob("*.c"))
    return {
        "libcuda.so.1": cuda + sorted((SOURCES / "ptx").glob("*.c")) + shared,
        "libnvidia-ml.so.1": nvml + shared,
        **dict.fromkeys(_RUNTIMES, runtime),
    }


def compile(  # noqa: A001 - the name that package builds and tests call
    out_dir: str | os.PathLike[str] = DEFAULT_OUT,
    *,
    sanitize: str | None = None,
    strict: bool = True,
    only: Collection[str] = (),
) -> None:
    """Compile each library in ``out_dir`` that is missing or older than its sources.

    ``sanitize`` (``"address"`` or ``"thread"``) adds this sanitizer to the libraries. A program
    that loads such libraries must preload the sanitizer's runtime. ``strict`` turns warnings into
    errors. It is for developers: a user's compiler may be newer and give new warnings. ``only``
    names the libraries to compile. If ``only`` is empty, the function compiles all libraries.

    Raises
    ------
    CompilerMissing
        If this machine has no C compiler.
    subprocess.CalledProcessError
        If the compiler fails; it has written the reason to standard error.
    """
    flags = [*compiler(), *_FLAGS, *(["-Werror"] if strict else [])]
    if sanitize:
        flags += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer", "-O1"]
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    directory = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # several test runs: one compiles, others wait
        for soname, sources in libraries().items():
            if only and soname not in only:
                continue
            more = [*_RUNTIMES[soname], _VERSIONED] if soname in _RUNTIMES else []
            _compile(out / soname, sources, [*flags, *more])
    finally:
        os.close(directory)


def _compile(target: Path, sources: Sequence[Path], command: Sequence[str]) -> None:
    inputs = [*sources, *SOURCES.rglob("*.h"), Path(__file__)]
    newest = max(path.stat().st_mtime_ns for path in inputs)
    if target.exists() and target.stat().st_mtime_ns >= newest:
        return
    # A process may be using the old file. So compile to a temporary name and then rename.
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    link = [*_LINK, f"-Wl,-soname,{target.name}", "-o", str(aside)]
    try:
        subprocess.run([*command, *map(str, sources), *link], check=True)
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)
    if target.name in _RUNTIMES:
        # Make no alias libcudart.so, which a linker would find. A program that is linked on this
        # machine must use NVIDIA's runtime, so that it also works on machines with a GPU.
        return
    alias = target.with_suffix("")
    if not alias.is_symlink():
        alias.unlink(missing_ok=True)
        alias.symlink_to(target.name)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile as the command line asks; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m emucuda.build")
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
        print(f"The emulated driver is in {options.out}")
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
