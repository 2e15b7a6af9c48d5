# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The session's account: growth, changed limits, dead processes, frees, reported figures."""

import ast
import os
import random
import signal
import struct
import subprocess
import sys

import pytest

from tests.emulated import library_dir

MIB = 1 << 20
OUT_OF_MEMORY, NOT_INITIALIZED, INVALID_VALUE, INVALID_CONTEXT = 2, 3, 1, 201
LOCK_AT = 48  # offset in the page, see guard/src/page.h

CALLS = """
def free(p):
    return C.cuMemFree_v2(ctypes.c_uint64(p))
def info():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    error = C.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    return error or (free.value, total.value)
def total(device=0):
    n = ctypes.c_size_t()
    return C.cuDeviceTotalMem_v2(ctypes.byref(n), device) or n.value
def alloc_async(n, stream=None):
    p = ctypes.c_uint64()
    return C.cuMemAllocAsync(ctypes.byref(p), ctypes.c_size_t(n), stream) or p.value
def free_async(p):
    return C.cuMemFreeAsync(ctypes.c_uint64(p), None)
class Prop(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int) for n in ("type", "handles", "where", "id")] + [
        ("meta", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8)]
def create(n, device=0):
    h = ctypes.c_uint64()
    prop = Prop(1, 0, 1, device)
    return C.cuMemCreate(ctypes.byref(h), ctypes.c_size_t(n), ctypes.byref(prop), 0) or h.value
"""


@pytest.fixture
def process(session):
    """Return a function that starts a process of the session, by default with a context."""

    def start(context=True, **variables):
        child = session.child(**variables)
        child.do(CALLS)
        if context:
            assert child.do("_ = context()") == 0
        return child

    return start


def used(session, device=0):
    return session.page.read().used[device]


def taken(session, device=0):
    """Return how many bytes of one device all processes together use."""
    code = (
        "import pynvml as n; n.nvmlInit()\n"
        f"h = n.nvmlDeviceGetHandleByIndex({device})\n"
        "print(n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2).used)"
    )
    env = {**os.environ, **session.machine_env}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, check=True)
    return int(done.stdout)


# ---------------------------------------------------------------- growth and limits


def grower(session, step, limit):
    """Make the broker grow a grant to a multiple of ``step``; return the list of the requests."""
    asked = []

    def answer(message):
        asked.append((message["device"], message["bytes"]))
        granted = list(session.page.read().granted)
        wanted = granted[message["device"]] + message["bytes"]
        wanted = -(-wanted // step) * step
        if wanted > limit:
            return {"type": "error", "code": "limit", "message": "no"}
        granted[message["device"]] = wanted
        session.page.set_grant(granted, limit, 1)
        return {"type": "ok", "granted": wanted}

    session.broker.answer = answer
    return asked


def test_grant_grows_in_steps_up_to_the_limit(session, process):
    session.grant(session.uuids, each=64 * MIB, limit=256 * MIB)
    asked = grower(session, 64 * MIB, 256 * MIB)
    child = process()
    # This allocation and the 32 MiB of the context together fill the grant exactly.
    assert child.do("p = alloc(32 << 20); _ = p > 802")
    assert asked == []
    assert child.do("q = alloc(2 << 20); _ = q > 802")
    assert asked == [(0, 2 * MIB)]
    assert session.page.read().granted == (128 * MIB, 64 * MIB)
    assert child.do("r = alloc(150 << 20); _ = r > 802")
    assert session.page.read().granted[0] == 256 * MIB
    assert used(session) == 216 * MIB
    assert child.do("_ = alloc(42 << 20)") == OUT_OF_MEMORY
    assert asked[2:] == [(0, 2 * MIB)]
    assert child.do("s = alloc(40 << 20); _ = s > 802")  # the process continues
    assert child.do("_ = [free(x) for x in (p, q, r, s)]") == [0] * 4
    assert used(session) == taken(session) == 32 * MIB


@pytest.mark.parametrize("code", ["limit", "no-memory", "quota", "surprise"])
def test_every_refusal_of_growth_returns_out_of_memory(session, process, code):
    session.grant(session.uuids, each=64 * MIB, limit=64 * MIB)
    session.broker.answer = lambda _: {"type": "error", "code": code, "message": "no"}
    child = process()
    for _ in range(3):
        assert child.do("_ = alloc(100 << 20)") == OUT_OF_MEMORY
    assert child.do("_ = C.cuCtxSynchronize()") == 0
    assert used(session) == 32 * MIB


def test_broker_that_grants_nothing_gets_only_a_few_requests(session, process):
    session.grant(session.uuids, each=64 * MIB, limit=64 * MIB)
    session.broker.answer = lambda _: {"type": "ok", "granted": 0}
    assert process().do("_ = alloc(100 << 20)") == OUT_OF_MEMORY
    assert 1 < len(session.broker.messages) < 20


def test_size_that_overflows_the_sum_is_refused(session, process):
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}
    child = process()
    for size in (2**64 - 1, 2**63, 2**64 - 32 * MIB):
        assert child.do(f"_ = alloc({size})") == OUT_OF_MEMORY
        assert child.do(f"_ = alloc_async({size})") == OUT_OF_MEMORY
        assert child.do(f"_ = create({size})") == OUT_OF_MEMORY
    assert used(session) == 32 * MIB


def test_changed_limit_applies_to_the_next_allocation(session, process):
    session.grant(session.uuids, each=128 * MIB, limit=128 * MIB)
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}
    child = process()
    child.do("p = alloc(64 << 20)")
    assert child.do("_ = alloc(64 << 20)") == OUT_OF_MEMORY
    session.page.set_grant([256 * MIB] * 2, 256 * MIB, 1)
    assert child.do("q = alloc(64 << 20); _ = q > 802")
    assert child.do("_ = info()") == (96 * MIB, 256 * MIB)
    session.page.set_grant([100 * MIB] * 2, 100 * MIB, 1)  # less than the memory in use
    assert child.do("_ = alloc(1 << 20)") == OUT_OF_MEMORY
    assert child.do("_ = info()") == (0, 100 * MIB)
    assert child.do("_ = C.cuCtxSynchronize()") == 0
    assert child.do("_ = (free(p), free(q))") == (0, 0)
    assert child.do("r = alloc(64 << 20); _ = r > 802")


# ---------------------------------------------------------------- processes


def test_killed_process_gives_its_bytes_back(session, process):
    session.grant(session.uuids, each=256 * MIB, limit=256 * MIB)
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}
    first, second = process(), process()
    assert first.do("p = alloc(128 << 20); _ = p > 802")
    assert second.do("_ = alloc(128 << 20)") == OUT_OF_MEMORY
    first.kill()
    assert second.do("_ = info()[0]") == 224 * MIB
    assert second.do("p = alloc(128 << 20); _ = p > 802")
    assert session.broker.messages[1:] == []  # the guard sent no second request
    assert len(session.slots()) == 1
    assert used(session) == taken(session) == 160 * MIB


def test_lock_of_a_killed_process_is_taken_over(session, process):
    session.grant(session.uuids, each=256 * MIB, limit=256 * MIB)
    first, second = process(), process()
    assert first.do("p = alloc(180 << 20); _ = p > 802")
    (slot,) = (slot for slot in session.slots() if slot.pid == first.pid)
    holder = slot.pid | (slot.start_time & 0xFFFFFFFF) << 32
    with open(session.page_path, "r+b") as file:
        file.seek(LOCK_AT)
        file.write(struct.pack("<Q", holder))
    # The second process needs the lock to find dead processes, so it waits.
    second.send("p = alloc(180 << 20); _ = p > 802")
    assert not second.answers(0.2)
    first.kill()
    assert second.reply() is True
    assert used(session) == 212 * MIB
    assert process().do("_ = 1") == 1


#: The most bytes that one call can add to a pool beyond the pool's charge: the largest request of
#: the test. A pool grows beyond its charge if the guard wrongly expects that a request fits in the
#: free part of the pool. After the driver's call, the guard reads the pool's size and undoes the
#: allocation. So each thread in a call adds at most one such step.
GROWTH = 64 * MIB

#: Number of times that the test runs all threads to their end. Between two runs, no thread is in a
#: call, and all memory stays allocated.
PHASES = 3


@pytest.mark.parametrize("ways", ["[(alloc, free)]", "[(alloc, free), (alloc_async, free_async)]"],
                         ids=["allocations", "and pools"])  # fmt: skip
def test_processes_together_never_exceed_the_grant(session, process, ways):
    """The guard sees only after a call that a pool is too large. It then gives the excess back."""
    session.grant(session.uuids, each=512 * MIB, limit=512 * MIB)
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}
    children = [process() for _ in range(3)]
    code = """
import random
class Racer:
    def __init__(self, seed):
        self.rng, self.held, self.refused, self.bad = random.Random(seed), [], 0, []
    def race(self, rounds):
        rng, held = self.rng, self.held
        C.cuCtxSetCurrent(current)
        for _ in range(rounds):
            if held and rng.random() < 0.45:
                p, how = held.pop(rng.randrange(len(held)))
                self.bad += [e for e in [how(p)] if e]
                continue
            take, how = rng.choice(WAYS)
            p = take(rng.choice([4096, 2 << 20, 30 << 20, 64 << 20]))
            if p == 2:
                self.refused += 1
            elif p < 1000:
                self.bad.append(p)
            else:
                held.append((p, how))
    def end(self):
        self.bad += [e for p, how in self.held for e in [how(p)] if e]
        return self.refused, self.bad
current = ctypes.c_void_p()
C.cuCtxGetCurrent(ctypes.byref(current))
def all_threads(rounds):
    threads = [threading.Thread(target=racer.race, args=(rounds,)) for racer in racers]
    for t in threads: t.start()
    for t in threads: t.join()
"""
    for i, child in enumerate(children):
        child.do(code.replace("WAYS", ways) + f"racers = [Racer({10 * i} + j) for j in range(3)]")
    for _ in range(PHASES):
        for child in children:
            child.send(f"_ = all_threads({150 // PHASES})")
        busy = list(children)
        while busy:
            beyond = max(0, taken(session) - 512 * MIB)
            assert beyond <= len(busy) * 3 * GROWTH * ("async" in ways), (
                "more than a step for each thread"
            )
            busy = [child for child in busy if not child.answers(0)]
        assert [child.reply() for child in children] == [None] * 3
        # No thread is in a call, so the guard must have given the excess back.
        assert used(session) <= 512 * MIB
        assert taken(session) <= 512 * MIB, "more than is granted, and it stays"
    ends = "_ = [racer.end() for racer in racers]; C.cuCtxSynchronize()"
    results = [result for child in children for result in child.do(ends)]
    assert [bad for _, bad in results if bad] == []
    assert sum(refused for refused, _ in results) > 0  # the grant was full at times
    assert used(session) == taken(session) == 3 * 32 * MIB


def test_forked_child_frees_nothing_of_its_parent(session, process):
    child = process()
    code = """
p = alloc(64 << 20)
r, w = os.pipe()
pid = os.fork()
if not pid:
    os.write(w, repr((free(p), alloc(1 << 20))).encode())
    os._exit(0)
os.waitpid(pid, 0)
_ = ast.literal_eval(os.read(r, 100).decode())
"""
    assert child.do(code) == (NOT_INITIALIZED, NOT_INITIALIZED)
    assert used(session) == 96 * MIB
    assert child.do("_ = free(p)") == 0
    assert used(session) == 32 * MIB


def test_fork_during_allocations_leaves_the_child_usable(session, process):
    """A forked child has one thread. A lock that another thread held must be free in the child."""
    child = process()
    code = """
stop = False
current = ctypes.c_void_p()
C.cuCtxGetCurrent(ctypes.byref(current))
def work():
    C.cuCtxSetCurrent(current)
    while not stop:
        free(alloc(4096)); free_async(alloc_async(4096))
threads = [threading.Thread(target=work) for _ in range(3)]
for t in threads: t.start()
found = []
for _ in range(50):
    pid = os.fork()
    if not pid:
        signal.alarm(20)
        os._exit(not (free(1 << 40) == alloc_async(512) == 3))
    found.append(os.waitpid(pid, 0)[1])
stop = True
for t in threads: t.join()
_ = sorted(set(found))
"""
    assert child.do(code) == [0]


# ---------------------------------------------------------------- which events free memory


def test_end_of_a_context_frees_its_counted_bytes(session, process):
    child = process(context=False)
    code = """
assert C.cuInit(0) == 0
c, d = ctypes.c_void_p(), ctypes.c_void_p()
made = [C.cuCtxCreate_v2(ctypes.byref(c), 0, 0), C.cuCtxCreate_v2(ctypes.byref(d), 0, 0)]
def fill():
    return alloc(64 << 20) > 802, alloc(4096) > 802
_ = made, fill()
"""
    assert child.do(code) == ([0, 0], (True, True))
    assert used(session) == taken(session) == 96 * MIB + 4096
    assert child.do("C.cuCtxSetCurrent(c); _ = fill()") == (True, True)
    assert used(session) == taken(session) == 160 * MIB + 8192
    assert child.do("_ = C.cuCtxDestroy_v2(d)") == 0
    assert used(session) == taken(session) == 96 * MIB + 4096
    assert [slot.context[0] for slot in session.slots()] == [32 * MIB]
    assert child.do("_ = C.cuCtxDestroy_v2(c)") == 0
    assert used(session) == taken(session) == 0
    assert [slot.context[0] for slot in session.slots()] == [0]


@pytest.mark.parametrize("end", ["cuDevicePrimaryCtxReset_v2", "cuDevicePrimaryCtxRelease_v2"])
def test_end_of_the_primary_context_frees_all_counted_bytes(session, process, end):
    child = process()
    for _ in range(3):
        assert child.do("_ = alloc(64 << 20) > 802")
        assert used(session) == 96 * MIB
        assert child.do(f"_ = C.{end}(0)") == 0
        assert used(session) == taken(session) == 0
        assert child.do("_ = context()") == 0
        assert used(session) == 32 * MIB


def test_allocation_refused_by_the_driver_is_not_charged(session, process):
    """The grant has room, but another program has taken the device's memory."""
    session.grant(session.uuids, each=900 * MIB, limit=900 * MIB)
    child = process()
    env = {**os.environ, **session.machine_env}
    code = """
import ctypes, sys
L = ctypes.CDLL("libcuda.so.1"); c = ctypes.c_void_p(); p = ctypes.c_uint64()
assert not L.cuInit(0) and not L.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0)
assert not L.cuCtxSetCurrent(c)
assert not L.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(500 << 20))
print(flush=True); sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"\n"
        assert child.do("_ = info()") == (868 * MIB, 900 * MIB)  # the grant is unchanged
        for take in ("alloc", "alloc_async", "create"):
            assert child.do(f"_ = {take}(600 << 20)") == OUT_OF_MEMORY
            assert used(session) == 32 * MIB
        assert session.broker.messages == []
        other.stdin.close()
    assert child.do("_ = alloc(600 << 20) > 802")


def test_frees_of_unknown_pointers_go_to_the_driver(session, process):
    child = process()
    assert child.do("p = alloc(64 << 20); _ = free(p + 512)") == INVALID_VALUE
    assert child.do("_ = free(0)") == 0
    assert child.do("_ = free(0x123456789000)") == INVALID_VALUE
    assert child.do("_ = C.cuMemRelease(ctypes.c_uint64(0x1234))") == INVALID_VALUE
    assert used(session) == 96 * MIB
    assert child.do("_ = free(p), free(p)") == (0, INVALID_VALUE)
    assert used(session) == 32 * MIB


def test_many_pointers_are_freed_in_any_order(session, process):
    child = process()
    order = random.Random(1)
    order_text = repr(order.sample(range(20000), 20000))
    assert child.do("ps = [alloc(512) for _ in range(20000)]; _ = len(set(ps))") == 20000
    assert used(session) == 32 * MIB + 20000 * 512
    assert child.do(f"_ = sum(free(ps[i]) for i in {order_text})") == 0
    assert used(session) == taken(session) == 32 * MIB


def test_one_unmap_frees_several_blocks(session, process):
    """An allocator with expandable segments unmaps several blocks with one call."""
    child = process()
    code = """
n = 2 << 20
base = ctypes.c_uint64()
assert C.cuMemAddressReserve(ctypes.byref(base), ctypes.c_size_t(8 * n), ctypes.c_size_t(0),
                             ctypes.c_uint64(0), ctypes.c_uint64(0)) == 0
handles = [create(n) for _ in range(8)]
def at(i):
    return ctypes.c_uint64(base.value + i * n)
def call(name, *args):
    return getattr(C, name)(*(ctypes.c_uint64(a) if isinstance(a, int) else a for a in args))
_ = [call("cuMemMap", at(i), n, 0, h, 0) for i, h in enumerate(handles)]
"""
    assert child.do(code) == [0] * 8
    assert used(session) == 48 * MIB
    assert child.do('_ = [call("cuMemRelease", h) for h in handles[:4]]') == [0] * 4
    assert used(session) == 48 * MIB
    assert child.do('_ = call("cuMemUnmap", at(0), 6 * n)') == 0
    assert used(session) == taken(session) == 40 * MIB  # two of the six blocks still have a handle
    assert child.do('_ = [call("cuMemRelease", h) for h in handles[4:]]') == [0] * 4
    assert used(session) == taken(session) == 36 * MIB
    assert child.do('_ = call("cuMemUnmap", at(6), 2 * n)') == 0
    assert used(session) == taken(session) == 32 * MIB


def test_pool_returns_memory_at_a_synchronise(session, process):
    child = process()
    assert child.do("p = alloc_async(64 << 20); _ = free_async(p)") == 0
    assert used(session) == taken(session) == 96 * MIB
    assert child.do("_ = C.cuStreamSynchronize(None)") == 0
    assert used(session) == taken(session) == 32 * MIB


def test_idle_pool_is_trimmed_before_a_refusal(session, process):
    session.grant(session.uuids, each=160 * MIB, limit=160 * MIB)
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}
    child = process()
    code = """
pool, all_of_it = ctypes.c_void_p(), ctypes.c_uint64(2**64 - 1)
assert C.cuDeviceGetDefaultMemPool(ctypes.byref(pool), 0) == 0
assert C.cuMemPoolSetAttribute(pool, 4, ctypes.byref(all_of_it)) == 0
p = alloc_async(100 << 20)
_ = free_async(p), C.cuCtxSynchronize()
"""
    assert child.do(code) == (0, 0)
    assert used(session) == 132 * MIB  # the pool keeps its memory
    assert child.do("q = alloc_async(100 << 20); _ = free_async(q), C.cuCtxSynchronize()") == (0, 0)
    assert used(session) == 132 * MIB  # the pool has reused its memory
    assert child.do("r = alloc(128 << 20); _ = r > 802")
    assert used(session) == taken(session) == 160 * MIB
    assert session.broker.messages == []
    assert child.do("_ = alloc_async(2 << 20)") == OUT_OF_MEMORY


def test_allowed_managed_memory_is_counted(session, process):
    session.grant(session.uuids, each=160 * MIB, limit=160 * MIB)
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}
    child = process()
    code = """
def managed(n):
    p = ctypes.c_uint64()
    return C.cuMemAllocManaged(ctypes.byref(p), ctypes.c_size_t(n), 1) or p.value
"""
    child.do(code)
    assert child.do("_ = managed(1 << 20)") == 801
    assert session.page.read().pins == ""
    session.page.set_policy(managed=True, context_bytes=32 * MIB)
    assert child.do("_ = managed(200 << 20)") == OUT_OF_MEMORY
    assert session.page.read().pins == ""
    assert child.do("p = managed(100 << 20); _ = p > 802")
    assert session.page.read().pins == "it uses managed memory"
    assert used(session) == 132 * MIB
    assert child.do("_ = free(p)") == 0
    assert used(session) == 32 * MIB


@pytest.mark.parametrize("source", ["default", "created on the host", "created on a device"])
def test_allowed_managed_pools_are_counted(session, process, source):
    session.grant(session.uuids, each=160 * MIB, limit=160 * MIB)
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}
    session.page.set_policy(managed=True, context_bytes=32 * MIB)
    child = process()
    code = """
class Where(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]
class Props(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("at", Where),
                ("rest", ctypes.c_byte * 72)]
def pool(source):
    made, at = ctypes.c_void_p(), Where(1, 0) if source == "created on a device" else Where(2, 0)
    out, props = ctypes.byref(made), Props(2, 0, at)
    error = (C.cuMemGetDefaultMemPool(out, ctypes.byref(at), 2) if source == "default"
             else C.cuMemPoolCreate(out, ctypes.byref(props)))
    assert error == 0, error
    return made
def take(n):
    p = ctypes.c_uint64()
    return C.cuMemAllocFromPoolAsync(ctypes.byref(p), ctypes.c_size_t(n), managed, None) or p.value
"""
    child.do(code + f"managed = pool({source!r})")
    assert child.do("_ = take(200 << 20)") == OUT_OF_MEMORY
    assert used(session) == 32 * MIB
    assert child.do("p = take(100 << 20); _ = p > 802")
    assert session.page.read().pins == "it uses managed memory"
    assert used(session) == 132 * MIB
    assert child.do("_ = take(100 << 20)") == OUT_OF_MEMORY
    assert child.do("_ = free_async(p)") == 0
    assert used(session) == 32 * MIB
    assert child.do("p = take(100 << 20); _ = free(p)") == 0
    assert used(session) == 32 * MIB
    assert child.do("p = take(64 << 20); _ = C.cuDevicePrimaryCtxReset_v2(0)") == 0
    assert used(session) == 0


GRAPHS = """
V, U, Z = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
class Props(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int) for n in ("type", "handles", "where", "id")] + [
        ("rest", ctypes.c_byte * 72)]
class Node(ctypes.Structure):
    _fields_ = [("pool", Props), ("access", V), ("accesses", Z), ("bytes", Z), ("address", U)]
def good(error):
    assert error == 0, error
def stream():
    made = V()
    good(C.cuStreamCreate(ctypes.byref(made), 1))
    return made
def graph(n, frees):
    # Return an executable that allocates n bytes and, if `frees` is true, also frees them.
    made, run, first, last = V(), V(), V(), V()
    node = Node(pool=Props(1, 0, 1, 0), bytes=n)
    good(C.cuGraphCreate(ctypes.byref(made), 0))
    good(C.cuGraphAddMemAllocNode(ctypes.byref(first), made, None, Z(0), ctypes.byref(node)))
    if frees:
        good(C.cuGraphAddMemFreeNode(ctypes.byref(last), made, ctypes.byref(first), Z(1),
                                     U(node.address)))
    good(C.cuGraphInstantiateWithFlags(ctypes.byref(run), made, U(0)))
    return run, node.address
"""


#: Makes two graphs that keep their memory, launches both, and frees the memory of the first in
#: between. So the second graph takes that memory, and the first needs new memory at its relaunch.
TWO_GRAPHS = """
s, (a, first), (b, second) = stream(), graph(64 << 20, False), graph(64 << 20, False)
_ = C.cuGraphLaunch(a, s), free(first), C.cuGraphLaunch(b, s)
"""


def test_graphs_relaunch_is_counted_if_it_takes_new_memory(session, process):
    session.grant(session.uuids, each=128 * MIB, limit=160 * MIB)
    asked = grower(session, 32 * MIB, 160 * MIB)
    child = process()
    assert child.do(GRAPHS + TWO_GRAPHS) == (0, 0, 0)
    assert used(session) == taken(session) == 96 * MIB
    assert child.do("_ = C.cuGraphLaunch(a, s)") == 0
    assert used(session) == taken(session) == 160 * MIB
    assert asked == [(0, 32 * MIB)]  # the grant has grown
    assert child.do("_ = free(first), free(second), C.cuDeviceGraphMemTrim(0)") == (0, 0, 0)
    assert used(session) == taken(session) == 32 * MIB


def test_relaunch_beyond_the_grant_succeeds_and_is_counted(session, process):
    """Before the launch the driver does not tell whether the graph takes new memory."""
    session.grant(session.uuids, each=128 * MIB, limit=128 * MIB)
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}
    child = process()
    assert child.do(GRAPHS + TWO_GRAPHS) == (0, 0, 0)
    assert child.do("_ = C.cuGraphLaunch(a, s)") == 0
    assert used(session) == taken(session) == 160 * MIB
    assert child.do("_ = alloc(2 << 20)") == OUT_OF_MEMORY


def test_relaunch_without_new_memory_fits_in_a_full_grant(session, process):
    """Two graphs in turn use the same memory, so the guard refuses none of their launches."""
    session.grant(session.uuids, each=96 * MIB, limit=96 * MIB)
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}
    child = process()
    child.do(GRAPHS + "s, t = stream(), stream()")
    child.do("(a, _), (b, _) = graph(64 << 20, True), graph(64 << 20, True)")
    assert child.do("_ = [C.cuGraphLaunch(g, on) for on in (s, t) for g in (a, b, a)]") == [0] * 6
    assert used(session) == taken(session) == 96 * MIB
    assert session.broker.messages == []


def test_repeated_launch_of_one_graph_does_not_ask_the_driver(session, process):
    """The child launches another graph in the driver itself, so the guard does not notice that."""
    child = process()
    child.do(GRAPHS + "s, t = stream(), stream()")
    child.do("(a, _), (b, _) = graph(64 << 20, True), graph(64 << 20, False)")
    child.do(f"D = ctypes.CDLL({str(library_dir() / 'libcuda.so.1')!r})")
    assert child.do("_ = C.cuGraphLaunch(a, s), D.cuGraphLaunch(b, s)") == (0, 0)
    assert child.do("_ = C.cuGraphLaunch(a, s)") == 0
    assert (used(session), taken(session)) == (96 * MIB, 160 * MIB)
    assert child.do("_ = C.cuGraphLaunch(a, t)") == 0  # not the same stream
    assert used(session) == taken(session) == 160 * MIB


# ---------------------------------------------------------------- devices and figures


def test_each_device_has_its_own_count(session, process):
    session.page.set_grant([128 * MIB, 96 * MIB], 128 * MIB, 1)
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}
    child = process()
    assert child.do("p = alloc(64 << 20); _ = p > 802")
    assert child.do("h = create(60 << 20, 1); _ = h > 802")  # created on the second device
    assert (used(session, 0), used(session, 1)) == (96 * MIB, 60 * MIB)
    assert child.do("_ = create(60 << 20, 1)") == OUT_OF_MEMORY
    assert session.broker.messages[-1]["device"] == 1
    assert child.do("_ = context(1)") == 0
    assert (used(session, 0), used(session, 1)) == (96 * MIB, 92 * MIB)
    assert child.do("_ = alloc(6 << 20)") == OUT_OF_MEMORY
    assert child.do("_ = info()") == (36 * MIB, 128 * MIB)
    assert child.do("_ = context(0); q = alloc(6 << 20); _ = q > 802")
    assert child.do("_ = free(p), free(q), C.cuMemRelease(ctypes.c_uint64(h))") == (0, 0, 0)
    assert (used(session, 0), used(session, 1)) == (32 * MIB, 32 * MIB)


def test_allocation_counts_on_the_device_of_its_stream(session, process):
    child = process()
    code = """
assert context(1) == 0
stream = ctypes.c_void_p()
assert C.cuStreamCreate(ctypes.byref(stream), 0) == 0
assert context(0) == 0
p = alloc_async(64 << 20, stream)
_ = p > 802
"""
    assert child.do(code)
    assert (used(session, 0), used(session, 1)) == (32 * MIB, 96 * MIB)
    assert (taken(session, 0), taken(session, 1)) == (32 * MIB, 96 * MIB)
    assert child.do("_ = C.cuMemFreeAsync(ctypes.c_uint64(p), stream), C.cuCtxSynchronize()") == (
        0,
        0,
    )
    assert child.do("_ = C.cuStreamSynchronize(stream)") == 0
    assert used(session, 1) == taken(session, 1)


def test_devices_in_another_order_are_counted_correctly(session, process):
    one, two = session.uuids
    child = process(CUDA_VISIBLE_DEVICES=f"{two},{one}")
    assert child.do("_ = alloc(64 << 20) > 802")
    assert (used(session, 0), used(session, 1)) == (0, 96 * MIB)


def test_total_memory_is_the_limit_before_any_lease(session, process):
    session.page.set_grant([0, 0], 384 * MIB, 0)
    session.page.set_gate(2)
    child = process(context=False)
    assert child.do("_ = C.cuInit(0), total(0), total(1)") == (0, 384 * MIB, 384 * MIB)
    assert child.do("_ = total(2)") == 101
    assert session.broker.messages == []


@pytest.mark.parametrize(
    ("name", "text", "whole"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "expandable_segments: True", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False,expandable_segments:True", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,expandable_segments:False", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:native", False),
    ],
)
def test_total_memory_is_constant_with_expandable_segments(session, process, name, text, whole):
    """The total must not change, because PyTorch reserves an address range of its first size.

    PyTorch crashes if a later block does not fit in this range.
    """
    session.grant(session.uuids, each=256 * MIB, limit=512 * MIB)
    child = process(**{name: text})
    size = 1024 * MIB if whole else 512 * MIB
    assert child.do("_ = total(), info()[1]") == (size, 512 * MIB)
    session.page.set_gate(2)
    session.page.set_grant([0, 0], 512 * MIB, 1)
    assert child.do("_ = total()") == size
    assert session.broker.messages == []


def test_first_query_of_total_memory_works_during_a_suspend(session, process):
    """The import of PyTorch may read the total while another library's context is suspended."""
    child = process(PYTORCH_ALLOC_CONF="expandable_segments:True")
    session.page.set_gate(2)
    session.page.set_grant([0, 0], 512 * MIB, 1)
    assert child.do("_ = total()") == 1024 * MIB
    assert session.broker.messages == []


def test_total_of_an_earlier_lease_is_not_reused(session, process):
    """With a new lease the guard asks the driver again: the new device may have another size."""
    child = process(PYTORCH_ALLOC_CONF="expandable_segments:True")
    assert child.do("_ = total()") == 1024 * MIB
    session.page.set_gate(2)
    session.page.set_grant([0, 0], 512 * MIB, 2)
    session.broker.answer = session.attach_on_request
    assert child.do("_ = total()") == 1024 * MIB
    assert len(session.broker.messages) == 1


def test_free_memory_is_what_the_session_can_still_take(session, process):
    session.grant(session.uuids, each=256 * MIB, limit=512 * MIB)
    child = process()
    assert child.do("_ = info()") == (480 * MIB, 512 * MIB)
    assert child.do("p = alloc(100 << 20); _ = info()") == (380 * MIB, 512 * MIB)
    session.page.set_grant([768 * MIB] * 2, 512 * MIB, 1)  # the limit was lowered
    assert child.do("_ = info()") == (636 * MIB, 768 * MIB)
    session.page.set_grant([256 * MIB] * 2, 1 << 40, 1)
    assert child.do("_ = info()") == (892 * MIB, 1024 * MIB)  # never more than the device has


def test_free_memory_excludes_a_neighbours_guarantee(session, process):
    session.grant(session.uuids, each=256 * MIB, limit=768 * MIB)
    child = process()
    assert child.do("_ = info()") == (736 * MIB, 768 * MIB)
    # 992 MiB of the device are free. A neighbour's guarantee leaves this session only 64 MiB.
    session.page.set_room([64 * MIB, 0])
    assert child.do("p = alloc(100 << 20); _ = info()") == (188 * MIB, 768 * MIB)
    assert child.do("q = C.cuMemFree_v2(ctypes.c_uint64(p)); _ = info()") == (288 * MIB, 768 * MIB)
    session.page.set_room([0, 0])
    assert child.do("_ = info()") == (224 * MIB, 768 * MIB)
    session.page.set_room([])
    assert child.do("_ = info()") == (736 * MIB, 768 * MIB)


def test_memory_figures_during_a_suspend_need_no_broker(session, process):
    session.grant(session.uuids, each=256 * MIB, limit=512 * MIB)
    child = process()
    assert child.do("p = alloc(100 << 20); _ = info()") == (380 * MIB, 512 * MIB)
    session.page.set_gate(2)
    session.page.set_grant([0, 0], 512 * MIB, 1)
    assert child.do("_ = info()") == (380 * MIB, 512 * MIB)
    assert child.do("_ = total()") == 512 * MIB
    assert session.broker.messages == []


def test_memory_figures_during_a_suspend_are_the_current_devices(session, process):
    """The thread makes another device's context current while the session is suspended."""
    session.grant(session.uuids, each=256 * MIB, limit=512 * MIB)
    child = process()
    child.do("""
first, second = ctypes.c_void_p(), ctypes.c_void_p()
C.cuCtxGetCurrent(ctypes.byref(first))
context(1); C.cuCtxGetCurrent(ctypes.byref(second)); q = alloc(50 << 20)
context(0); p = alloc(100 << 20)
""")
    session.page.set_gate(2)
    session.page.set_grant([0, 0], 512 * MIB, 1)
    assert child.do("_ = info()") == (380 * MIB, 512 * MIB)
    assert child.do("C.cuCtxSetCurrent(second); _ = info()") == (430 * MIB, 512 * MIB)
    assert session.broker.messages == []


@pytest.mark.parametrize("end", ["C.cuCtxSetCurrent(None)", "C.cuCtxDestroy_v2(c)"])
def test_memory_figures_need_a_current_context(session, process, end):
    """Without a context the guard does not answer itself, but lets the driver refuse the call."""
    child = process(context=False)
    child.do(
        "C.cuInit(0); c = ctypes.c_void_p(); C.cuCtxCreate_v2(ctypes.byref(c), 0, 0)\n"
        "p = alloc(1 << 20)"
    )
    session.page.set_gate(2)
    session.broker.answer = session.attach_on_request
    assert child.do(f"{end}; _ = info()") == INVALID_CONTEXT
    assert len(session.broker.messages) == 1


def test_context_that_does_not_fit_grows_the_grant_or_fails(session, process):
    session.grant(session.uuids, each=16 * MIB, limit=128 * MIB)
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}
    child = process(context=False)
    assert child.do("_ = context()") == OUT_OF_MEMORY
    assert used(session) == taken(session) == 0
    asked = grower(session, 64 * MIB, 128 * MIB)
    assert child.do("_ = context()") == 0
    assert asked == [(0, 16 * MIB)]
    assert used(session) == taken(session) == 32 * MIB


def test_guard_without_a_page_counts_nothing(session):
    code = """
import ctypes
L = ctypes.CDLL("libcuda.so.1"); c = ctypes.c_void_p(); p = ctypes.c_uint64()
f, t = ctypes.c_size_t(), ctypes.c_size_t()
print([L.cuInit(0), L.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0), L.cuCtxSetCurrent(c),
       L.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(900 << 20)), L.cuMemFree_v2(p),
       L.cuMemAllocAsync(ctypes.byref(p), ctypes.c_size_t(900 << 20), None),
       L.cuMemFreeAsync(p, None), L.cuMemGetInfo_v2(ctypes.byref(f), ctypes.byref(t)),
       L.cuCtxSynchronize(), L.cuDevicePrimaryCtxRelease_v2(0), t.value])
"""
    found = ast.literal_eval(session.python(code, GPUPOOL_PAGE=None))
    assert found == [0] * 10 + [1 << 30]
    assert used(session) == 0


def test_process_ended_by_a_signal_leaves_no_bytes(session, process):
    """A different signal ends each process. The bytes of an ended process no longer count."""
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGABRT):
        child = process()
        assert child.do("_ = alloc(400 << 20) > 802")
        child.process.send_signal(number)
        child.process.wait(30)
    assert process().do("_ = alloc(400 << 20) > 802")
    assert used(session) == taken(session) == 432 * MIB
