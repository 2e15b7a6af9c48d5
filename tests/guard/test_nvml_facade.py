# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The NVML facade: the session's devices show the slice's memory. No other answer changes."""

import ast
import json
import os
import subprocess
import sys

import pytest

from jupyter_gpupool.guard import build
from tests.emulated import environment, library_dir

MIB = 1 << 20
GIB = 1 << 30

LOOK = """
import pynvml as n
n.nvmlInit()
found = []
for i in range(n.nvmlDeviceGetCount()):
    h = n.nvmlDeviceGetHandleByIndex(i)
    v1, v2 = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, version=n.nvmlMemory_v2)
    found.append((v1.total, v1.used, v1.free, v2.total, v2.used, v2.free, v2.reserved))
print(found)
"""


@pytest.fixture
def nvml_dir(guard_dir):
    """Return the folder of the NVML facade. A session's processes have it on LD_LIBRARY_PATH."""
    for name in ("libnvidia-ml.so.1", "libnvidia-ml.so"):
        if not (guard_dir / name).is_symlink():
            (guard_dir / name).symlink_to(build.DEFAULT_OUT / "libnvidia-ml.so.1")
    return guard_dir


@pytest.fixture
def session(nvml_dir, make_session):
    return make_session("2x1GiB,context=32MiB,reserved=16MiB")


def look(session, **variables):
    return ast.literal_eval(session.python(LOOK, **variables))


def test_device_of_the_session_shows_the_slices_memory(session):
    session.grant(session.uuids[1:], each=256 * MIB, limit=384 * MIB)
    child = session.child()
    assert child.do("_ = context()") == 0
    child.do("p = alloc(100 << 20)")
    whole, mine = look(session)
    assert whole == (GIB, 16 * MIB, GIB - 16 * MIB, GIB, 0, GIB - 16 * MIB, 16 * MIB)
    total, used = 384 * MIB, 132 * MIB
    assert mine == (total, used, total - used, total, used, total - used, 0)
    assert child.do("_ = C.cuMemFree_v2(ctypes.c_uint64(p))") == 0
    assert look(session)[1][1] == 32 * MIB
    child.kill()  # a dead process has no memory
    assert look(session)[1][1] == 0


def test_total_memory_depends_on_limit_grant_and_device(session):
    session.page.set_grant([0], 384 * MIB, 2)
    session.page.set_devices(session.uuids[:1])
    assert look(session)[0][0] == 384 * MIB
    session.page.set_grant([256 * MIB], 128 * MIB, 2)
    assert look(session)[0][0] == 256 * MIB
    session.page.set_grant([256 * MIB], 64 * GIB, 2)
    assert look(session)[0][0] == GIB  # never more than the device has


def test_nvml_query_without_a_page_path_takes_no_slot(session):
    """In a container, the session's page has no path, and the guard gets it from the broker.

    An NVML query does not load the CUDA driver, so the process needs no slot for the query.
    """
    session.grant(session.uuids, each=256 * MIB, limit=384 * MIB)
    session.broker.page = lambda: True
    with session.page_path.open("r+b") as page:
        session.broker.passes = [page.fileno()]
        child = session.child(GPUPOOL_PAGE="passed")
        found = child.do(LOOK.replace("print(found)", "_ = found"))
        assert [total for total, *_ in found] == [384 * MIB] * 2
        assert len(session.broker.pages) == 1
        assert session.slots() == ()
        assert child.do("_ = context()") == 0
        assert [slot.pid for slot in session.slots()] == [child.pid]
        assert len(session.broker.pages) == 1


@pytest.mark.parametrize("path", [None, "", "/nowhere/page", "/dev/zero", __file__])
def test_facade_changes_nothing_without_a_page(session, path):
    assert look(session, GPUPOOL_PAGE=path) == look(
        session, LD_LIBRARY_PATH=str(library_dir()), LD_PRELOAD=None
    )


def test_facade_answers_instead_of_the_driver(session):
    """The facade is the loaded library. Otherwise the tests above would test the driver's NVML."""
    code = "import ctypes; ctypes.CDLL('libnvidia-ml.so.1').gpupool_guard; print('ours')"
    assert session.python(code, LD_PRELOAD=None) == "ours"
    with pytest.raises(AssertionError, match="undefined symbol: gpupool_guard"):
        session.python(code, LD_PRELOAD=None, LD_LIBRARY_PATH=str(library_dir()))


def test_facade_has_every_function_of_the_driver(nvml_dir):
    def names(path):
        done = subprocess.run(
            ["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True
        )
        words = [line.split() for line in done.stdout.splitlines()]
        return {w[2] for w in words if w[1] == "T" and w[2].startswith("nvml")}

    driver, facade = names(library_dir() / "libnvidia-ml.so.1"), names(nvml_dir / "libnvidia-ml.so")
    assert len(driver) > 50
    assert driver - facade == set()
    assert len(facade) > 400


def test_first_call_of_nvidia_smi_reaches_the_driver(session):
    """nvidia-smi first calls a function that no header declares.

    Without this function, it prints "function not found".
    """
    code = "import ctypes; n = ctypes.CDLL('libnvidia-ml.so.1'); n.nvmlInit_v2(); "
    found = session.python(code + "print(n.nvmlInternalGetExportTable(None, None))")
    assert int(found) == 13  # the emulated driver does not have the function


def test_function_that_the_driver_lacks_returns_not_found(session):
    code = """
import ctypes
L = ctypes.CDLL("libnvidia-ml.so.1")
L.nvmlErrorString.restype = ctypes.c_char_p
print(L.nvmlDeviceGetPdi(0, 0), L.nvmlErrorString(13).decode())
"""
    assert session.python(code) == "13 Function Not Found"


def test_missing_driver_returns_library_not_found(session, tmp_path):
    """The facade finds no driver. pynvml raises the same error as without any NVML library."""
    code = """
import ctypes, pynvml
try:
    pynvml.nvmlInit()
except pynvml.NVMLError_LibraryNotFound as error:
    print(error)
L = ctypes.CDLL("libnvidia-ml.so.1")
L.nvmlErrorString.restype = ctypes.c_char_p
print(L.nvmlDeviceGetMemoryInfo(0, 0), *(L.nvmlErrorString(n).decode() for n in (12, 3)))
"""
    text = session.python(code, GPUPOOL_REAL_LIBNVML=str(tmp_path / "none"))
    assert text.splitlines() == [
        "NVML Shared Library Not Found",
        "12 NVML Shared Library Not Found Unknown Error",
    ]


def test_facade_opens_the_driver_that_the_user_names(session):
    real = str(library_dir() / "libnvidia-ml.so.1")
    folder = session.env["LD_LIBRARY_PATH"].split(":")[0]
    found = look(session, GPUPOOL_REAL_LIBNVML=real, LD_LIBRARY_PATH=folder)
    assert found == look(session)
    assert look(session, GPUPOOL_REAL_LIBNVML="", LD_LIBRARY_PATH=f"{folder}:{library_dir()}")


def test_facade_does_not_find_itself(session, tmp_path):
    """The search for the driver skips the facade's own file, under any name, and its copies."""
    folder = tmp_path / "copies"
    folder.mkdir()
    (folder / "libnvidia-ml.so.1").write_bytes(
        (build.DEFAULT_OUT / "libnvidia-ml.so.1").read_bytes()
    )
    paths = f"{session.env['LD_LIBRARY_PATH'].split(':')[0]}:{folder}:{library_dir()}"
    assert look(session, LD_LIBRARY_PATH=paths) == look(session)


def test_nvitop_runs_on_the_facade_unchanged(session):
    session.grant(session.uuids, each=256 * MIB, limit=384 * MIB)
    child = session.child()
    assert child.do("_ = context()") == 0
    code = """
import json, nvitop
devices = nvitop.Device.all()
print(json.dumps([(d.memory_total(), d.memory_used(), d.memory_free()) for d in devices]))
"""
    found = json.loads(session.python(code))
    total, used = 384 * MIB, 32 * MIB
    assert found == [[total, used, total - used], [total, 0, total]]
    done = session.run(sys.executable, "-m", "nvitop", "-1", TERM="dumb")
    assert "384.0MiB" in done.stdout.replace(" ", "") or "384MiB" in done.stdout.replace(" ", "")


def test_other_calls_reach_the_driver_unchanged(session):
    """In this test, many threads make their first call at the same time."""
    code = """
import pynvml as n, threading
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(1)
found = set()
def ask():
    found.add((n.nvmlDeviceGetName(h), n.nvmlDeviceGetUUID(h), n.nvmlSystemGetDriverVersion(),
               n.nvmlDeviceGetCount(), n.nvmlDeviceGetUtilizationRates(h).gpu))
threads = [threading.Thread(target=ask) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
print(sorted(found))
"""
    bare = {**os.environ, **environment("2x1GiB,context=32MiB,reserved=16MiB",
                                        session.folder / "machine", base={})}  # fmt: skip
    want = subprocess.run(
        [sys.executable, "-c", code], env=bare, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert session.python(code) == want
    assert session.uuids[1] in want
