# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Run a program on emulated devices: ``python -m emucuda 2x16GiB nvitop -1``."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from typing import Sequence

from .faults import check_faults
from .sizes import EmulatorError
from .specification import environment

_USAGE = "python -m emucuda [--state DIR] [--faults TEXT] MACHINE [PROGRAM ...]"
_EPILOG = """\
Programs with the same DIR share the devices; without --state, DIR is /dev/shm/emucuda-UID.
Without a PROGRAM, the command prints variables for a shell: eval "$(python -m emucuda 2x16GiB)"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Replace this process by the program. Return an exit status if that is impossible."""
    parser = argparse.ArgumentParser(
        prog="python -m emucuda",
        usage=_USAGE,
        description="Run a program on emulated CUDA devices.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("machine", metavar="MACHINE", help="2x16GiB, or 1x80GiB,bandwidth=8GB/s")
    parser.add_argument(
        "program", metavar="PROGRAM", nargs=argparse.REMAINDER, help="and its arguments"
    )
    parser.add_argument("--state", metavar="DIR", help="directory of the devices' shared state")
    parser.add_argument("--faults", metavar="TEXT", help="such as 'slow-copies bandwidth=1GB/s'")
    options = parser.parse_args(argv)
    try:
        found = environment(options.machine, options.state)
        if options.faults:
            found["EMUCUDA_FAULTS"] = check_faults(options.faults)
    except EmulatorError as error:
        print(f"emucuda: {error}", file=sys.stderr)
        return 2
    program = options.program[options.program[:1] == ["--"] :]
    if not program:
        print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in found.items()))
        return 0
    try:
        os.execvpe(program[0], program, {**os.environ, **found})
    except OSError as error:
        print(f"emucuda: {program[0]} cannot be started: {error.strerror}.", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main())
