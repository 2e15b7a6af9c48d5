# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Libraries that PyTorch links and an emulated device cannot use: cuBLAS, cuDNN, NCCL and others.

NVIDIA's libraries take 3 GB on the disk. On an emulated device their first call fails, because they
contain NVIDIA's runtime, and this runtime refuses the emulated driver. So :func:`build` makes a
stand-in for each library that is not installed. A stand-in has the names that PyTorch looks up in
the library. A call of such a name returns an error, and the first call prints the name. PyTorch's
operators do not need these libraries on an emulated device (see ``operators``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from emucuda.build import compiler
from emucuda.specification import library_dir

#: For each library: the prefix of its functions' names, and the value that they return for "not
#: supported".
STATUS = {
    "cublasLt": 15, "cublas": 15, "cudnn": 3000, "cufft": 16, "cuFile": 5026, "cupti": 27,
    "curand": 999, "cusolver": 9, "cusparseLt": 10, "cusparse": 10, "nccl": 5, "nvJitLink": 7,
    "nvrtc": 11, "nvshmem": 1, "nvtx": 0,
}  # fmt: skip
_SONAME = re.compile(
    r"lib(cublasLt|cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparseLt|cusparse|nccl"
    r"|nvJitLink|nvrtc|nvshmem_host|nvToolsExt)\.so\.[\d.]+"
)

_SOURCE = r"""
#include <stdio.h>
static long refuse(const char *name, int *told, long status)
{
    if (!__atomic_exchange_n(told, 1, __ATOMIC_RELAXED))
        fprintf(stderr, "emucuda: %s is of a library that is not emulated.\n", name);
    return status;
}
#define STATUS(name, code) \
    long name(void);       \
    long name(void) { static int told; return refuse(#name, &told, code); }
#define TEXT(name) const char *name(void); const char *name(void) { return "not emulated"; }
#define TEXT_INTO(name)                     \
    int name(int status, const char **text); \
    int name(int status, const char **text) { (void)status; *text = "not emulated"; return 0; }
#define ZERO(name) long name(void); long name(void) { return 0; }
"""


def folder() -> Path:
    """Return the folder in which this environment keeps these libraries."""
    return Path(sys.prefix) / "lib" / "emucuda" / "stand-ins"


def _line(name: str, prefix: str) -> str:
    if name == "cuptiGetResultString":  # this text makes the profiler record the host alone
        return f"TEXT_INTO({name})"
    if name.endswith(("String", "ErrorName")) or name == "ncclGetLastError":
        return f"TEXT({name})"
    # PyTorch reads versions when it is imported, so these calls succeed. Calls for the ranges of a
    # profiler also succeed, because they have nothing to do here.
    if "Version" in name or not STATUS[prefix]:
        return f"ZERO({name})"
    return f"STATUS({name}, {STATUS[prefix]})"


def _owner(prefix: str, sonames: set[str]) -> str | None:
    stem = {"cuFile": "cufile", "nvtx": "nvToolsExt", "nvshmem": "nvshmem_host"}.get(prefix, prefix)
    return next((s for s in sonames if s.startswith(f"lib{stem}.so")), None)


def wanted(libraries: list[Path]) -> dict[str, dict[tuple[str, str], str]]:
    """Return the names that ``libraries`` look up in each NVIDIA library.

    The outer key is the file name (soname) of an NVIDIA library. The inner key is a name with its
    symbol version ("" for none). The value is the prefix of the name in :data:`STATUS`.
    """
    sonames: set[str] = set()
    names: set[tuple[str, str]] = set()
    for path in libraries:
        dynamic = subprocess.run(
            ["readelf", "-dW", path], capture_output=True, text=True, check=True
        ).stdout
        sonames.update(m[0] for m in _SONAME.finditer(dynamic))
        undefined = subprocess.run(
            ["nm", "-D", "--undefined-only", path], capture_output=True, text=True, check=True
        ).stdout
        for line in undefined.splitlines():
            name, _, version = line.split()[-1].partition("@")
            names.add((name, version.lstrip("@")))
    found: dict[str, dict[tuple[str, str], str]] = {soname: {} for soname in sonames}
    for name, version in sorted(names):
        prefix = next((p for p in STATUS if name.startswith(p)), None)
        owner = _owner(prefix, sonames) if prefix else None
        if prefix and owner:
            found[owner][name, version] = prefix
    return found


def build(torch: Path, out: Path | None = None) -> list[str]:
    """Make a stand-in for each NVIDIA library that PyTorch links and that is not installed.

    ``torch`` is the folder of PyTorch. Returns the file names of the stand-ins. Needs a C compiler
    and the binutils.
    """
    target = out or folder()
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("lib*"):
        old.unlink()
    made = []
    packages = torch.parent / "nvidia"
    for soname, names in sorted(wanted(sorted((torch / "lib").glob("*.so"))).items()):
        if any(packages.glob(f"*/lib/{soname}")):
            continue
        with tempfile.TemporaryDirectory() as folder_:
            source = Path(folder_) / "stand_in.c"
            lines = {name: _line(name, prefix) for (name, _), prefix in names.items()}
            source.write_text(_SOURCE + "\n".join(lines.values()) + "\n")
            # In one NVIDIA library, all names have the same symbol version. In some libraries this
            # version is the file name of the library.
            version = next((v for _, v in names if v), soname)
            script = Path(folder_) / "versions"
            script.write_text(f"{version} {{ global: *; }};\n")
            flags = ["-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{soname}"]
            flags += [f"-Wl,--version-script={script}", "-o", str(target / soname)]
            subprocess.run([*compiler(), *flags, str(source)], check=True)
        made.append(soname)
    return made


def load(origin: str, *, emulated: bool) -> None:
    """Load the emulated runtime and the stand-ins, before PyTorch looks for such libraries.

    When PyTorch then asks for one of these libraries by name, the dynamic loader uses the loaded
    one. ``origin`` is the path of PyTorch's ``__init__.py``. If there are no emulated devices and
    NVIDIA's runtime is installed, this function loads no runtime. PyTorch then gets NVIDIA's
    runtime, because the emulated runtime would find no device.
    """
    theirs = Path(origin).parents[1].glob("nvidia/*/lib/libcudart.so.*")
    with contextlib.suppress(OSError):
        if not emulated and any(theirs):
            raise FileNotFoundError
        linked = (Path(origin).parent / "lib" / "libc10_cuda.so").read_bytes()
        for name in re.findall(rb"libcudart\.so\.1[23]", linked)[:1]:
            ctypes.CDLL(str(library_dir() / name.decode()), mode=ctypes.RTLD_GLOBAL)
    for path in sorted(folder().glob("lib*")):
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def name_compiler() -> None:
    """Let Triton and PyTorch's compiler pass PTX to the driver, which interprets it."""
    os.environ.setdefault("TRITON_PTXAS_PATH", str(Path(__file__).with_name("ptxas")))


def main() -> int:
    """Make the libraries for this environment's PyTorch; return the exit status."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        print("PyTorch is not installed in this environment.", file=sys.stderr)
        return 1
    made = build(Path(spec.origin).parent)
    print(f"{len(made)} libraries in {folder()}: {', '.join(made)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
