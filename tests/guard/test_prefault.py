# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Populated mappings for a checkpoint: several threads of the guard fill them with huge pages."""

from pathlib import Path

import pytest

MiB = 1 << 20

#: POPULATED is MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE. UNPOPULATED lacks MAP_POPULATE. RESERVED
#: also has MAP_NORESERVE.
POPULATED, UNPOPULATED, RESERVED = 0x8022, 0x22, 0xC022

MAP = """
whole = ctypes.CDLL(None, use_errno=True)
for call in whole.mmap, whole.mmap64:
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

def mapped(size, prot, flags, call):
    "Return success, resident bytes, huge pages, zeroes, errno and new threads."
    before = len(os.listdir("/proc/self/task"))
    ctypes.set_errno(7)
    at = call(None, size, prot, flags, -1, 0)
    error = ctypes.get_errno()
    if at == ctypes.c_void_p(-1).value:
        return False, error
    resident, huge, here = 0, False, False
    for line in open("/proc/self/smaps"):
        first = line.split()[0]
        if "-" in first and ":" not in first:
            low, high = (int(x, 16) for x in first.split("-"))
            here = low < at + size and at < high
        elif here and first == "Rss:":
            resident += 1024 * int(line.split()[1])
        elif here and first == "VmFlags:":
            huge = huge or "hg" in line.split()
    zero = prot != 3 or not any(ctypes.string_at(at, size))
    return True, resident, huge, zero, error, len(os.listdir("/proc/self/task")) - before
"""


@pytest.fixture
def child(session):
    """A process with a context. The gate is closed, as before a suspend."""
    session.grant(session.uuids, each=64 * MiB, limit=64 * MiB)
    made = session.child()
    assert made.do("_ = context()") == 0
    session.page.set_gate(2)
    made.do(MAP)
    return made


def mapped(child, size, prot=3, flags=POPULATED, call="mmap"):
    return child.do(f"_ = mapped({size}, {prot}, {flags}, whole.{call})")


@pytest.mark.parametrize("call", ["mmap", "mmap64"])
@pytest.mark.parametrize("size", [64 * MiB, 70 * MiB + 12345])
def test_populated_mapping_is_resident_and_filled_with_zeros(child, size, call):
    made, resident, _, zero, error, threads = mapped(child, size, call=call)
    assert made
    assert resident >= size
    assert (zero, error, threads) == (True, 7, 0)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this kernel has no transparent huge pages",
)
def test_populated_mapping_may_have_huge_pages(child):
    """The mapping asks Linux for huge pages. Without a free huge page, Linux uses small pages."""
    assert mapped(child, 64 * MiB)[2]


@pytest.mark.parametrize(
    ("size", "prot", "flags"),
    [
        (64 * MiB, 3, UNPOPULATED),
        (64 * MiB, 1, UNPOPULATED),
        (16 * MiB, 3, POPULATED),
        (64 * MiB, 3, RESERVED),
    ],
)
def test_guard_does_not_change_other_mappings(child, size, prot, flags):
    made, resident, huge, *_, threads = mapped(child, size, prot, flags)
    assert made
    assert not huge
    assert threads == 0
    if flags == UNPOPULATED:
        assert resident < size


def test_process_with_its_slice_gets_plain_mappings(session, child):
    """With the gate open, the guard leaves a mapping in one piece.

    A library may move a mapping with mremap(), and this fails on a mapping of several pieces.
    """
    session.page.set_gate(0)
    assert mapped(child, 64 * MiB)[1:3] == (64 * MiB, False)


def test_process_without_a_context_gets_plain_mappings(session):
    session.grant(session.uuids, each=64 * MiB, limit=64 * MiB)
    session.page.set_gate(2)
    made = session.child()
    made.do(MAP)
    assert mapped(made, 64 * MiB)[1:3] == (64 * MiB, False)


def test_mapping_fails_if_there_is_no_address_space(child):
    child.do("import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))")
    assert mapped(child, 4096 * MiB) == (False, 12)
