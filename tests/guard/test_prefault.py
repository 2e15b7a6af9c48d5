# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Host memory that is populated at once, as a checkpoint's is: huge pages, by several threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpupool.guard import install

MiB = 1 << 20

#: MAP_PRIVATE, MAP_ANONYMOUS and MAP_POPULATE, and flags that differ from these by one.
POPULATED, UNPOPULATED, RESERVED = 0x8022, 0x22, 0xC022

MAP = """
import ctypes, os, sys
bytes_, prot, flags, how = map(int, sys.argv[1:])
whole = ctypes.CDLL(None, use_errno=True)
call = whole.mmap64 if how else whole.mmap
call.restype = ctypes.c_void_p
call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
before = len(os.listdir("/proc/self/task"))
ctypes.set_errno(7)
at = call(None, bytes_, prot, flags, -1, 0)
error = ctypes.get_errno()
rows, here = {}, False
for line in open("/proc/self/smaps"):
    if "-" in line.split()[0] and ":" not in line.split()[0]:
        low, high = (int(x, 16) for x in line.split()[0].split("-"))
        here = low < at + bytes_ and at < high
    elif here:
        name, _, value = line.partition(":")
        if name == "Rss":
            rows[name] = rows.get(name, 0) + 1024 * int(value.split()[0])
        if name == "VmFlags":
            rows.setdefault(name, []).append("hg" in value.split())
zero = prot != 3 or not any(ctypes.string_at(at, bytes_))
print([at != ctypes.c_void_p(-1).value, rows["Rss"], any(rows["VmFlags"]), zero, error,
       len(os.listdir("/proc/self/task")) - before])
"""


def mapped(size, prot=3, flags=POPULATED, how=0, **env):
    """Return success, resident bytes, huge pages, zeroes, errno and new threads."""
    done = subprocess.run(
        [sys.executable, "-c", MAP, *map(str, (size, prot, flags, how))],
        env={**os.environ, "LD_PRELOAD": str(install.library()), **env},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


@pytest.mark.parametrize("how", [0, 1], ids=["mmap", "mmap64"])
@pytest.mark.parametrize("size", [64 * MiB, 70 * MiB + 12345])
def test_populated_mapping_is_whole_and_zero(size, how):
    made, resident, _, zero, error, threads = mapped(size, how=how)
    assert made
    assert resident >= size
    assert (zero, error, threads) == (True, 7, 0)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this kernel has no transparent huge pages",
)
def test_populated_mapping_may_have_huge_pages():
    """Whether the kernel has some is another question: then its pages are small."""
    assert mapped(64 * MiB)[2]


@pytest.mark.parametrize(
    ("size", "prot", "flags"),
    [
        (64 * MiB, 3, UNPOPULATED),
        (64 * MiB, 1, UNPOPULATED),
        (16 * MiB, 3, POPULATED),
        (64 * MiB, 3, RESERVED),
    ],
)
def test_other_mappings_stay_as_they_are(size, prot, flags):
    made, resident, huge, *_, threads = mapped(size, prot, flags)
    assert made
    assert not huge
    assert threads == 0
    if flags == UNPOPULATED:
        assert resident < size


def test_mapping_without_address_space_fails_as_before():
    code = MAP.replace(
        "at = call(",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); at = call(",
    ).split("rows, here")[0]
    done = subprocess.run(
        [sys.executable, "-c", code + "print(at == ctypes.c_void_p(-1).value, error)",
         str(4096 * MiB), "3", str(POPULATED), "0"],
        env={**os.environ, "LD_PRELOAD": str(install.library())},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "12"]
