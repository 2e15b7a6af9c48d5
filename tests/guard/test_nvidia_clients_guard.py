# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""NVIDIA's own clients, unchanged, on the emulated driver under the guard.

These tests use numba-cuda's device arrays, streams and events. They use none of its kernels:
numba-cuda compiles kernels with NVRTC or NVVM to machine code for a GPU, and the emulated driver
refuses such code. cuda-core runs the kernels that the emulated driver knows.
"""

import os
import sys
from textwrap import dedent

import pytest

from jupyter_gpupool.guard import page as pages

MIB = 1 << 20
CONTEXT = 32 * MIB

SUSPEND = """
import sys
from cuda.core.checkpoint import Process
p = Process(int(sys.argv[1]))
p.lock(10000); p.checkpoint(); p.restore(); p.unlock()
"""

#: A program that runs the lines it reads.
CLIENT = r"""
import ast, sys
g = {}
for line in sys.stdin:
    try:
        exec(ast.literal_eval(line), g)
        out = repr(g.pop("_", None))
    except BaseException as error:
        out = repr(("raised", type(error).__name__, str(error)))
    print("\x01" + out, flush=True)
"""

NUMBA = """
import numpy as np
from numba import cuda
want = np.random.default_rng(1).integers(0, 256, 4 << 20, dtype=np.uint8)
a = cuda.to_device(want)
_ = bool((a.copy_to_host() == want).all())
"""

CORE = """
import numpy as np
from cuda.core import *
device = Device(0); device.set_current(); stream = device.create_stream()
want = np.random.default_rng(1).integers(0, 256, 4 << 20, dtype=np.uint8)
host = LegacyPinnedMemoryResource().allocate(4 << 20)
view = np.from_dlpack(host).view(np.uint8)
view[:] = want
a = device.allocate(4 << 20, stream=stream)
a.copy_from(host, stream=stream); stream.sync()
def equal():
    view[:] = 0
    a.copy_to(host, stream=stream); stream.sync()
    return bool((view == want).all())
_ = equal()
"""

#: For each client, the statements after a suspend. They compare the bytes on the device with the
#: bytes from before the suspend.
AGAIN = {NUMBA: "_ = bool((a.copy_to_host() == want).all())", CORE: "_ = equal()"}


@pytest.fixture
def client(session):
    """Return a function that starts a child process and runs a client's statements in it."""

    def start(code, each=512 * MIB, **variables):
        session.grant(session.uuids[:1], each=each, limit=each)
        child = session.child([sys.executable, "-uc", CLIENT], **variables)
        assert child.do(code, 60) is True
        return child

    return start


def _used(session):
    return session.page.read().used[0]


def _suspend_and_resume(session, child, until):
    session.page.set_gate(pages.CLOSED)
    until(lambda: session.page.read().inflight == 0)
    session.run(sys.executable, "-c", SUSPEND, child.pid, LD_PRELOAD="", GPUPOOL_PAGE="")


@pytest.mark.parametrize("code", [NUMBA, CORE], ids=["numba-cuda", "cuda-core"])
def test_next_call_resumes_a_suspended_client_with_its_bytes(session, client, until, code):
    child = client(code)
    assert _used(session) == CONTEXT + 4 * MIB
    _suspend_and_resume(session, child, until)
    child.send(AGAIN[code])
    session.broker.asked(1)  # the call waits for the lease
    assert session.broker.messages[0]["type"] == "attach"
    assert not child.answers(0.1)
    session.page.set_gate(pages.UNUSED)
    assert child.reply(60) is True


def test_numba_reports_the_limit_as_out_of_memory(session, client):
    child = client(NUMBA, each=128 * MIB)
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}
    found = child.do("b = cuda.device_array(120 << 20, dtype=np.uint8)")
    assert found[0] == "raised"
    assert "OUT_OF_MEMORY" in found[2].upper().replace(" ", "_")
    assert child.do("b = cuda.device_array(60 << 20, dtype=np.uint8); _ = b.size") == 60 * MIB
    assert child.do("_ = tuple(cuda.current_context().get_memory_info())")[1] == 128 * MIB
    child.do("a = b = None; cuda.current_context().deallocations.clear()")
    assert _used(session) == CONTEXT


def test_numba_sees_the_devices_of_the_session(session, client):
    """numba loads libcuda.so before libcuda.so.1."""
    child = client(NUMBA)
    code = "_ = (len(cuda.gpus), str(cuda.get_current_device().uuid), cuda.is_available())"
    # The machine has two devices, but the session's page lists only the first device. So numba must
    # see only one device.
    count, uuid, available = child.do(code)
    assert (count, available) == (1, True)
    assert uuid == session.uuids[0]
    driver = os.path.realpath(session.directory / "libcuda.so.1")
    assert child.do(f"_ = {driver!r} in open('/proc/self/maps').read()") is True


def test_streams_events_and_host_memory_of_numba_work(session, client):
    child = client(NUMBA)
    code = """
    s = cuda.stream()
    pinned = cuda.pinned_array(1 << 20, dtype=np.uint8)
    pinned[:] = want[: 1 << 20]
    d = cuda.to_device(pinned, stream=s)
    back = cuda.pinned_array_like(pinned)
    start, end = cuda.event(), cuda.event()
    start.record(s); d.copy_to_host(back, stream=s); end.record(s)
    end.wait(s); end.synchronize(); s.synchronize()
    mapped = cuda.mapped_array(1000, dtype=np.int64)
    mapped[:] = 3
    with cuda.pinned(want):
        e = cuda.to_device(want, stream=s); s.synchronize()
    _ = (bool((back == pinned).all()), start.elapsed_time(end) >= 0, end.query(), int(mapped.sum()))
    """
    assert child.do(dedent(code), 60) == (True, True, True, 3000)
    # Device memory counts in whole pages of 2 MiB. Host memory does not count.
    assert _used(session) == CONTEXT + (4 + 2 + 4) * MIB


def test_cuda_core_runs_kernels_and_reports_out_of_memory(session, client):
    child = client(CORE, each=128 * MIB)
    code = """
    from emucuda.kernels import PTX
    module = ObjectCode.from_ptx(PTX.encode())
    numbers = device.allocate(400_000, stream=stream)
    launch(stream, LaunchConfig(grid=8, block=64), module.get_kernel("emucuda_iota_u32"),
           numbers, np.uint64(100_000), np.uint32(7))
    Buffer.from_handle(int(host.handle), 400_000).copy_from(numbers, stream=stream)
    stream.sync()
    good = bool((view[:400_000].view(np.uint32) == np.arange(7, 100_007)).all())
    try:
        device.allocate(120 << 20, stream=stream)
        refused = ""
    except Exception as error:
        refused = str(error)
    numbers.close(stream); a.close(stream); stream.sync()
    _ = good, refused
    """
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}
    good, refused = child.do(dedent(code), 60)
    assert good
    assert "OUT_OF_MEMORY" in refused
    assert [m["type"] for m in session.broker.messages] == ["grow"]
