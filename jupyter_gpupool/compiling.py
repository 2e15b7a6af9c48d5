# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Compiling the C parts, the guard and the emulated driver: what both builds share.

Needs only a C compiler (``$CC``, or ``cc``) and libc's headers. Also run by the package build, when
nothing that this package requires is installed: standard library only.
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
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Callable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: How every library of ours is compiled.
FLAGS = (
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


class CompilerMissing(RuntimeError):
    """There is no C compiler to call, or it makes code for a processor the source is not for."""


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


@dataclass(frozen=True)
class Build:
    """What one part compiles."""

    #: The sources of each library, by SONAME.
    libraries: Mapping[str, Sequence[Path]]
    #: Files besides the sources whose change makes a library old.
    headers: Sequence[Path]
    #: Flags besides :data:`FLAGS`, and those of the linker.
    flags: Sequence[str]
    link: Sequence[str]
    #: Called with SONAME, sources and an empty folder before a library is compiled: it may write
    #: generated sources there, and returns what comes on the compiler's command line for them.
    generate: Callable[[str, Sequence[Path], Path], Sequence[str]] = lambda *_: ()

    def into(
        self, out_dir: str | os.PathLike[str], *, sanitize: str | None = None, strict: bool = True
    ) -> None:
        """Compile each library into ``out_dir`` that is older there than what it is made of.

        ``sanitize`` is ``"address"`` or ``"thread"``: instrumented libraries, for which the program
        that loads them must preload the sanitizer's runtime. ``strict`` makes warnings errors,
        which is right for developers and wrong where a later compiler warns of something new.

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
        flags = [*FLAGS, *self.flags, *(["-Werror"] if strict else [])]
        if sanitize:
            flags += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"]
        with _alone(out):
            for soname, sources in self.libraries.items():
                if sources and self._stale(out / soname, sources):
                    self._compile(soname, sources, out / soname, [*command, *flags])

    def _stale(self, target: Path, sources: Sequence[Path]) -> bool:
        if not target.exists():
            return True
        newest = max(path.stat().st_mtime_ns for path in [*sources, *self.headers, Path(__file__)])
        return target.stat().st_mtime_ns < newest

    def _compile(
        self, soname: str, sources: Sequence[Path], target: Path, command: Sequence[str]
    ) -> None:
        # Compiled aside and renamed: a process may be running on the old file.
        temporary = target.with_name(f".{soname}.{os.getpid()}")
        link = [*self.link, f"-Wl,-soname,{soname}", "-o", str(temporary), "-ldl"]
        with tempfile.TemporaryDirectory(prefix="gpupool-build-") as folder:
            generated = self.generate(soname, sources, Path(folder))
            try:
                names = [*generated, *map(str, sources)]
                subprocess.run([*command, *names, *link], check=True)
                temporary.replace(target)
            finally:
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep concurrent test runs from compiling over one another."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def command_line(
    module: str,
    what: str,
    default: Path,
    compile: Callable[..., None],  # noqa: A002 - as the builds call it
    argv: Sequence[str] | None,
) -> int:
    """Compile ``what`` as ``python -m module``; return the exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--out", type=Path, default=default, help="directory to compile into")
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
    print(f"{what} is in {options.out}")
    return 0
