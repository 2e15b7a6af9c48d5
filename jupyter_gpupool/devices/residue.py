# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Device memory that is in use and no process's: what the driver takes beside what it says.

NVML's ``reserved`` is only a part of it. Some more stays from the first context on, and a little
comes and goes with every context. It is nobody's who could give it back, so it must not count as
memory that somebody outside the pool uses: a request for a whole device would wait for ever.
"""

from __future__ import annotations

from .model import DeviceSample

#: More than this of a device is no residue, but memory of processes that NVML does not list.
MOST, MOST_PART = 1 << 30, 8

#: By so much may the driver's own memory differ from one look to the next, at most this part.
SLACK, SLACK_PART = 64 << 20, 256


def unattributed(sample: DeviceSample) -> int:
    """Return the bytes in use that NVML lists with no process.

    0 where a process is listed without its bytes: they may be all of these.
    """
    if any(process.bytes is None for process in sample.processes):
        return 0
    return max(0, sample.used - sum(process.bytes or 0 for process in sample.processes))


def slack(total: int) -> int:
    """Return by how much the driver's own memory may vary on a device of ``total`` bytes."""
    return min(SLACK, total // SLACK_PART)


def reserved(sample: DeviceSample, residue: int) -> int:
    """Return the bytes that are the driver's: what NVML says, ``residue``, and room to vary.

    A driver that shows none at all, neither before nor after a context was made, is exact.
    """
    kept = sample.reserved + min(residue, MOST, sample.total // MOST_PART)
    return kept + slack(sample.total) if kept else 0
