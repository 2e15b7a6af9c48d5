# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The recorder as a command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import __doc__ as about
from .child import Hung
from .libraries import CUDA, NVML, found_by_loader
from .record import record, written

#: If root runs the recorder, NVIDIA's cuInit and nvmlInit make this file, even if the kernel has no
#: driver.
CONTROL = Path("/dev/nvidiactl")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.driver_records",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", help="has libcuda.so.1 and libnvidia-ml.so.1")
    parser.add_argument("--anywhere", action="store_true", help="only what needs no absence")
    parser.add_argument("--quick", action="store_true", help="do not call every function")
    options = parser.parse_args()
    folder = options.folder
    missing = [n for n in (CUDA, NVML) if folder and not (Path(folder) / n).is_file()]
    if missing:
        parser.error(f"There is no {' and no '.join(missing)} in {folder}.")
    made_here = not CONTROL.exists()
    try:
        paths = (f"{folder}/{CUDA}", f"{folder}/{NVML}") if folder else found_by_loader()
        found = record(*paths, device=None if options.anywhere else False, every=not options.quick)
    except (OSError, LookupError, RuntimeError, Hung) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        if made_here and not options.anywhere:
            CONTROL.unlink(missing_ok=True)
    sys.stdout.write(written(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
