# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The slot counts each stream that records a graph, until something ends the recording."""

import pytest

from jupyter_gpupool.guard import page as pages

SETUP = """
V = ctypes.c_void_p
def stream():
    made = V()
    assert C.cuStreamCreate(ctypes.byref(made), 1) == 0
    return made
def begin(s, mode=2):
    return C.cuStreamBeginCapture_v2(s, mode)
def end(s):
    graph = V()
    return C.cuStreamEndCapture(s, ctypes.byref(graph)), bool(graph.value)
a, b = stream(), stream()
def elsewhere(call):
    found = []
    t = threading.Thread(target=lambda: found.append((C.cuCtxSetCurrent(current), call())))
    t.start(); t.join()
    return found[0][1]
current = V(); C.cuCtxGetCurrent(ctypes.byref(current))
"""


@pytest.fixture
def child(session):
    made = session.child()
    assert made.do("_ = context()") == 0
    made.do(SETUP)
    return made


def captures(session):
    return session.page.read().captures


def test_each_recording_stream_is_counted_until_its_end(session, child):
    assert captures(session) == 0
    assert child.do("_ = begin(a), begin(b)") == (0, 0)
    assert captures(session) == 2
    assert child.do("_ = begin(a)") != 0  # the stream already records
    assert captures(session) == 2
    assert child.do("_ = end(a)") == (0, True)
    assert captures(session) == 1
    assert child.do("_ = end(b), end(b)[0] != 0") == ((0, True), True)
    assert captures(session) == 0


def test_recording_is_counted_until_its_own_thread_ends_it(session, child):
    assert child.do("_ = begin(a, 1)") == 0
    error, graph = child.do("_ = elsewhere(lambda: end(a))")
    assert error != 0
    assert not graph
    assert captures(session) == 1
    assert child.do("_ = end(a)[0] != 0") is True  # the recording is broken, and this call ends it
    assert captures(session) == 0


def test_broken_recording_is_counted_until_a_call_ends_it(session, child):
    assert child.do("_ = begin(a), C.cuStreamSynchronize(a) != 0") == (0, True)
    assert captures(session) == 1
    assert child.do("_ = end(a)[0] != 0") is True
    assert captures(session) == 0


def test_recording_ends_with_its_stream(session, child):
    assert child.do("_ = begin(a), C.cuStreamDestroy_v2(a)") == (0, 0)
    assert captures(session) == 0


def test_recording_ends_with_its_context(session, child):
    child.do("other = V(); C.cuCtxCreate_v2(ctypes.byref(other), 0, 0); s = stream()")
    assert child.do("_ = begin(s), begin(b)") == (0, 0)
    assert captures(session) == 2
    assert child.do("_ = C.cuCtxDestroy_v2(other)") == 0
    assert captures(session) == 1


def test_only_a_relaxed_recording_continues_after_its_thread(session, child, until):
    """A thread begins two recordings and ends.

    No other thread can end recording ``a``, so ``a`` ends with its thread. Recording ``b`` is in
    the relaxed mode, so another thread can end ``b``.
    """
    assert child.do("_ = elsewhere(lambda: (begin(a, 1), begin(b, 2)))") == (0, 0)
    until(lambda: captures(session) == 1)
    assert child.do("_ = end(b)") == (0, True)
    assert captures(session) == 0


def test_forked_child_records_nothing(session, child):
    assert child.do("_ = begin(a)") == 0
    child.do("""
r, w = os.pipe(); r2, w2 = os.pipe()
pid = os.fork()
if not pid:
    C.cuCtxSynchronize()
    os.write(w, b"1"); os.read(r2, 1); os._exit(0)
os.read(r, 1)
""")
    slots = session.slots()
    assert sorted(slot.captures for slot in slots) == [0, 1]
    child.do("os.write(w2, b'1'); os.waitpid(pid, 0)")


def test_recording_marks_the_gate_as_used(session, child):
    session.page.set_gate(pages.UNUSED)
    assert child.do("_ = begin(a)") == 0
    assert session.page.gate() == pages.OPEN
    assert child.do("_ = end(a)") == (0, True)
