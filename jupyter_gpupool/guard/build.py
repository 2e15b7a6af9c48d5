# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Compile the guard: ``python -m jupyter_gpupool.guard.build``.

Needs only a C compiler (``$CC``, or ``cc``) and libc's headers. Also run by the package build,
which imports this file by its path: standard library only, nothing from this package.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HERE = Path(__file__).resolve().parent
SOURCES = _HERE / "src"
ENTRIES = _HERE / "entries.txt"
NVML_ENTRIES = _HERE / "nvml_entries.txt"
GENERATOR = _HERE / "_generate.py"
#: Where the installed package looks for the libraries.
DEFAULT_OUT = _HERE / "lib"

_FLAGS = (
    "-std=gnu11",
    "-D_GNU_SOURCE",
    "-O2",
    "-g1",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-fvisibility=hidden",
    # A thread's count of nested calls is read at each: no call of __tls_get_addr for it.
    "-ftls-model=initial-exec",
    "-pthread",
)
# -Bsymbolic: another library may define our names; inside the guard they are ours. nodelete: a
# wait at the gate, a signal handler and the driver outlive a dlclose(). Bound lazily: a process
# that never calls CUDA looks no symbol up.
_LINK = ("-shared", "-Wl,-Bsymbolic", "-Wl,-z,lazy", "-Wl,-z,nodelete", "-Wl,-z,noexecstack")

#: C functions of the guard that serve an entry point, as they are defined.
_WRAP = re.compile(r"\bwrap_(cu\w+)\s*\([^;{}]*\)\s*\{")


class CompilerMissing(RuntimeError):
    """There is no C compiler to call, or it makes code for a processor the guard is not for."""


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


def _generator() -> Any:
    name = "_gpupool_guard_generate"
    spec = importlib.util.spec_from_file_location(name, GENERATOR)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{GENERATOR} cannot be loaded; the source tree is incomplete.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    others = [*SOURCES.rglob("*.h"), *SOURCES.rglob("*.S"), ENTRIES, NVML_ENTRIES, GENERATOR]
    others.append(Path(__file__))
    newest = max(path.stat().st_mtime_ns for path in [*sources, *others])
    return target.stat().st_mtime_ns < newest


def _wraps(command: Sequence[str], sources: Sequence[Path], generated: Path) -> set[str]:
    """Return the entry points that have a C function. Asks the preprocessor: macros make some."""
    flags = ["-E", "-P", "-std=gnu11", "-D_GNU_SOURCE", f"-I{generated}", f"-I{SOURCES}"]
    done = subprocess.run(
        [*command, *flags, *map(str, sources)], check=True, stdout=subprocess.PIPE, text=True
    )
    return set(_WRAP.findall(done.stdout))


def _generate(command: Sequence[str], sources: Sequence[Path], folder: Path) -> None:
    generator = _generator()
    entries = generator.read(ENTRIES)
    # The header first, for the preprocessor; it does not depend on which functions there are.
    (folder / "entries_gen.h").write_text(generator.header(entries), encoding="ascii")
    wraps = _wraps(command, sources, folder)
    for name, text in generator.generate(entries, wraps).items():
        (folder / name).write_text(text, encoding="ascii")


def compile(  # noqa: A001 - the name the package build and the tests call
    out_dir: str | os.PathLike[str] = DEFAULT_OUT,
    *,
    sanitize: str | None = None,
    strict: bool = True,
) -> None:
    """Compile the libraries into ``out_dir``, if the sources are newer than what is there.

    ``sanitize`` is ``"address"`` or ``"thread"``: instrumented libraries, for which the program
    that loads them must preload the sanitizer's runtime. ``strict`` makes warnings errors, which
    is right for developers and wrong where a later compiler warns of something new.

    Raises
    ------
    CompilerMissing
        If there is no C compiler, or this is not x86-64.
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
            if not sources or not _stale(target, sources):
                continue
            # Compiled aside and renamed: a process may be running on the old file.
            temporary = out / f".{soname}.{os.getpid()}"
            link = [*_LINK, f"-Wl,-soname,{soname}", "-o", str(temporary)]
            with tempfile.TemporaryDirectory(prefix="gpupool-guard-") as folder:
                names = [f"-I{folder}", f"-I{SOURCES}", *map(str, sources)]
                if soname == "libcuda.so.1":
                    _generate(command, sources, Path(folder))
                    names.append(str(Path(folder) / "entries_gen.S"))
                else:
                    for name, text in _generator().nvml(NVML_ENTRIES).items():
                        (Path(folder) / name).write_text(text, encoding="ascii")
                    names.append(str(Path(folder) / "nvml_gen.S"))
                try:
                    subprocess.run([*command, *_FLAGS, *extra, *names, *link, "-ldl"], check=True)
                    temporary.replace(target)
                finally:
                    temporary.unlink(missing_ok=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile on the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jupyter_gpupool.guard.build")
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
    print(f"The guard is in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
