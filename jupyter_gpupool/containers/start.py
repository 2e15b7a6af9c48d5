# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Starts a Pooled GPU kernel in a container. This package may be missing in the image.

This program must work with every version of Python and with every C library. If an image cannot
load the guard, the kernel starts without a GPU, and this program prints the reason in one line.
"""

import os
import re
import sys

PYTHON = (3, 10)


def problem(library: str) -> str:
    """Return why this image cannot use the guard in the file ``library``; "" if it can."""
    if sys.version_info < PYTHON:
        return "Pooled GPU kernels need Python {}.{} or newer, and this image has {}.{}".format(
            *PYTHON, *sys.version_info[:2]
        )
    try:
        found = re.match(r"glibc (\d+)\.(\d+)", os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (AttributeError, ValueError, OSError):
        found = None
    if found is None:
        return (
            "this image has musl or another C library, and the guard needs glibc; use an image of "
            "Debian"
        )
    with open(library, "rb") as file:
        names = re.findall(rb"\bGLIBC_(\d+)\.(\d+)\b", file.read())
    needed = max((int(major), int(minor)) for major, minor in names)
    here = (int(found.group(1)), int(found.group(2)))
    if here < needed:
        return "the guard needs glibc {}.{} or newer, and this image has {}.{}".format(
            *needed, *here
        )
    return ""


def main() -> None:
    """Replace this process by the kernel."""
    here = os.path.dirname(os.path.abspath(__file__))
    why = problem(os.path.join(here, "gpupool-guard", "libcuda.so.1"))
    module = "ipykernel_launcher"
    if why:
        sys.stderr.write(f"GPU pool: this kernel runs without a GPU: {why}.\n")
        sys.stderr.flush()
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    else:
        module = "jupyter_gpupool.ipykernel_launcher"
        rest = os.environ.get("PYTHONPATH", "")
        paths = [os.path.join(here, "python"), rest] if rest else [os.path.join(here, "python")]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.execv(sys.executable, [sys.executable, "-m", module] + sys.argv[1:])  # noqa: RUF005


if __name__ == "__main__":
    main()
