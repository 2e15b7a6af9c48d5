# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""How a process finds the driver's functions, and which library the guard opens as the driver."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from jupyter_gpupool.guard import build as guard_build
from jupyter_gpupool.guard import page as pages
from tests.emulated import build as emulator_build
from tests.emulated import library_dir

NOT_INITIALIZED, NO_DEVICE, NOT_FOUND, NOT_SUPPORTED = 3, 100, 500, 801
PER_THREAD = 2

#: Statements of a child. get() calls cuGetProcAddress_v2 and returns (error, address, status). With
#: ``form``, get() calls the older form, which has four arguments. call() calls the function at an
#: address. at() returns the address of a function that the guard exports. value() calls a function
#: and returns the value that the function stores.
HELP = """
def get(name, version=13000, flags=0, form=C.cuGetProcAddress_v2, with_status=True):
    p, status = ctypes.c_void_p(77), ctypes.c_int(77)
    args = [name.encode(), ctypes.byref(p), version, ctypes.c_uint64(flags)]
    error = form(*args, ctypes.byref(status) if with_status else None)
    return error, p.value, status.value
def call(address, *args):
    return ctypes.CFUNCTYPE(ctypes.c_int)(address)(*args)
def at(symbol):
    return ctypes.cast(getattr(C, symbol), ctypes.c_void_p).value
def value(address, *args):
    v = ctypes.c_uint64()
    error = call(address, ctypes.byref(v), *args)
    return ("error", error) if error else v.value
"""


@pytest.fixture
def emulated(session):
    child = session.child()
    child.do(HELP)
    return child


@pytest.fixture
def odd_as(session, compiled):
    """Return a function that links the odd driver with given flags and starts a child with it."""

    def make(*link):
        driver = compiled("odd_driver", "-shared", "-fPIC", "-fvisibility=hidden", *link,
                          output="odd.so")  # fmt: skip
        child = session.child(GPUPOOL_REAL_LIBCUDA=str(driver))
        child.do(HELP)
        return child

    return make


@pytest.fixture
def odd(odd_as):
    """Return a child with the odd driver.

    With -Bsymbolic, the driver's names lead to its own functions.
    """
    return odd_as("-Wl,-Bsymbolic")


# ---------------------------------------------------------------------- cuGetProcAddress


def test_callers_get_the_guards_functions(emulated):
    names = ["cuInit", "cuMemAlloc", "cuLaunchKernel", "cuStreamSynchronize", "cuCtxCreate"]
    assert emulated.do(f"_ = [get(n)[1] for n in {names}]") == emulated.do(
        "_ = [at(n) for n in ('cuInit', 'cuMemAlloc_v2', 'cuLaunchKernel', 'cuStreamSynchronize',"
        " 'cuCtxCreate_v4')]"
    )


@pytest.mark.parametrize(
    ("name", "version", "flags", "symbol"),
    [
        ("cuCtxCreate", 3020, 0, "cuCtxCreate_v2"),
        ("cuCtxCreate", 11040, 0, "cuCtxCreate_v3"),
        ("cuCtxCreate", 12040, 0, "cuCtxCreate_v3"),
        ("cuCtxCreate", 12050, 0, "cuCtxCreate_v4"),
        ("cuCtxSynchronize", 12080, 0, "cuCtxSynchronize"),
        ("cuCtxSynchronize", 13000, 0, "cuCtxSynchronize_v2"),
        ("cuMemcpyHtoD", 13000, 0, "cuMemcpyHtoD_v2"),
        ("cuMemcpyHtoD", 13000, PER_THREAD, "cuMemcpyHtoD_v2_ptds"),
        ("cuMemAllocAsync", 13000, 1, "cuMemAllocAsync"),
        ("cuMemAllocAsync", 13000, PER_THREAD, "cuMemAllocAsync_ptsz"),
        ("cuLaunchKernel", 13000, PER_THREAD, "cuLaunchKernel_ptsz"),
        ("cuInit", 13000, PER_THREAD, "cuInit"),
        ("cuGetProcAddress", 11030, 0, "cuGetProcAddress"),
        ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
        ("cuGetProcAddress", -1, 0, "cuGetProcAddress_v2"),
    ],
)
def test_version_and_flags_select_the_form_of_a_call(emulated, name, version, flags, symbol):
    error, address, status = emulated.do(f"_ = get({name!r}, {version}, {flags})")
    assert (error, status) == (0, 0)
    assert address == emulated.do(f"_ = at({symbol!r})")


def test_guard_answers_a_missing_name_as_the_driver_does(emulated, odd):
    """cuGetProcAddress_v2 succeeds with a status. The older form fails and keeps the pointer."""
    assert odd.do("_ = get('cuNoSuchCall')") == (0, None, 1)
    assert odd.do("_ = get('cuNoSuchCall', with_status=False)") == (0, None, 77)
    assert odd.do("_ = get('cuTooNew')") == (0, None, 2)
    assert odd.do("_ = get('cuNoSuchCall', form=C.cuGetProcAddress)") == (NOT_FOUND, 77, 77)
    assert emulated.do("_ = get('cuNoSuchCall')") == (0, None, 1)
    assert emulated.do("_ = get('cuCtxSynchronize', 1000)") == (0, None, 2)
    assert emulated.do("_ = get('cuInit', 13000, 99)")[0] == 1
    assert (
        emulated.do("_ = C.cuGetProcAddress_v2(None, None, 13000, ctypes.c_uint64(4), None)") == 1
    )


@pytest.mark.parametrize("name", ["cuInit", "cuMemAlloc", "cuNoSuchCall"])
def test_guard_refuses_a_too_new_version_as_the_driver_does(emulated, name):
    """The call fails, and changes neither the caller's pointer nor the caller's status."""
    for version in (13010, 2**31 - 1):
        for options in ("", ", with_status=False", ", form=C.cuGetProcAddress", ", flags=2"):
            assert emulated.do(f"_ = get({name!r}, {version}{options})") == (1, 77, 77)


def test_cugetprocaddress_before_cuda_12_has_four_arguments(odd):
    """The older form has four arguments. The guard must not write a status to a fifth argument."""
    assert odd.do("_ = get('cuStreamCreate', 11080, 1, C.cuGetProcAddress)[2]") == 77
    four = odd.do("_ = get('cuGetProcAddress', 11030)")[1]
    five = odd.do("_ = get('cuGetProcAddress', 12000)")[1]
    assert [four, five] == odd.do("_ = [at('cuGetProcAddress'), at('cuGetProcAddress_v2')]")


def test_guard_returns_the_call_that_the_driver_gives_for_a_name(odd):
    """The driver may have several forms of a call with one name.

    The guard recognises a form by the address that the driver returns, not only by the name.
    """
    flags = odd.do("C.cuInit(0); _ = get('cuGraphInstantiate', 14000)[1]")
    assert flags == odd.do("_ = at('cuGraphInstantiateWithFlags')")
    out = "ctypes.byref(ctypes.c_void_p())"
    assert odd.do(f"_ = call({flags}, {out}, None, ctypes.c_uint64(3))") == 3
    for version in (11080, 12000, 13000):
        five = odd.do(f"_ = get('cuGraphInstantiate', {version})[1]")
        assert five == odd.do("_ = at('cuGraphInstantiate_v2')")
    assert odd.do(f"_ = call({five}, {out}, None, None, None, ctypes.c_size_t(5))") == 0x2000 + 5


@pytest.mark.parametrize(
    ("call", "pin"),
    [
        ("C.cuMemGetHandleForAddressRange({}, ctypes.c_uint64(8), ctypes.c_size_t(8), 1, 0)", 2),
        ("C.cuGLRegisterBufferObject({})", 4),
    ],
)
def test_memory_shared_with_other_devices_pins_the_session(odd, session, call, pin):
    """The guard pins the session only if the call succeeds.

    The emulated driver's call always fails, so this test uses the odd driver.
    """
    assert odd.do("C.cuInit(0); _ = " + call.format("None" if "Handle" in call else 0)) == 1
    assert session.slots()[0].pins == 0
    assert odd.do("_ = " + call.format("ctypes.c_void_p(8)" if "Handle" in call else 1)) == 0
    assert session.slots()[0].pins == pin


def test_calls_reach_a_driver_that_returns_the_guards_functions(odd_as):
    """Without -Bsymbolic, the driver's look-up of its own functions finds the guard's functions."""
    odd = odd_as()
    found = odd.do("C.cuInit(0); _ = get('cuStreamCreate')[1]")
    assert found == odd.do("_ = at('cuStreamCreate')")
    assert odd.do(f"_ = value({found}, 3)") == 0x1000 + 3
    assert odd.do("_ = value(at('cuStreamCreate'), 4)") == 0x1000 + 4
    renamed = odd.do("_ = get('cuRenamed')[1]")
    assert renamed == odd.do("_ = at('cuStreamSynchronize')")
    assert odd.do(f"_ = call({renamed}, None)") == 0x1000 + 1


def test_version_and_flags_reach_the_driver_unchanged(odd):
    odd.send("_ = get('cuMemAlloc', 12345, 2)")
    assert odd.line() == "five cuMemAlloc 12345 2"
    odd.reply()
    odd.send("_ = get('cuMemAlloc', 11999, 1, C.cuGetProcAddress)")
    assert odd.line() == "four cuMemAlloc 11999 1"
    odd.reply()
    odd.send("_ = get('cuTooNew', 2147483647, 18446744073709551615)")
    assert odd.line() == "five cuTooNew 2147483647 18446744073709551615"
    assert odd.reply() == (0, None, 2)


def test_guard_knows_an_unexported_function_by_its_name(odd):
    """The driver may return a function that it does not export.

    The guard wraps and counts this function too, and calls the address that the driver returned.
    """
    alloc = odd.do("_ = get('cuMemAlloc')")[1]
    assert alloc == odd.do("_ = at('cuMemAlloc_v2')")
    assert odd.do(f"C.cuInit(0); _ = value({alloc}, ctypes.c_size_t(8))") == 0x2000 + 8
    # The driver exports neither this call nor its per-thread variant.
    for flags, symbol, base in (
        (0, "cuMemAllocAsync", 0x2000),
        (2, "cuMemAllocAsync_ptsz", 0x4000),
    ):
        found = odd.do(f"_ = get('cuMemAllocAsync', 13000, {flags})")[1]
        assert found == odd.do(f"_ = at({symbol!r})")
        assert odd.do(f"_ = value({found}, ctypes.c_size_t(8), None)") == base + 8
    wait = odd.do("_ = get('cuStreamSynchronize')")[1]
    assert wait == odd.do("_ = at('cuStreamSynchronize')")
    assert odd.do(f"_ = call({wait}, None)") == 0x2001


def test_guard_recognises_an_unknown_name_by_its_address(odd):
    assert odd.do("_ = get('cuRenamed')")[1] == odd.do("_ = at('cuStreamSynchronize')")


def test_newer_form_of_a_call_gets_all_its_arguments(odd):
    old = odd.do("_ = get('cuStreamCreate', 13000)")[1]
    new = odd.do("_ = get('cuStreamCreate', 14000)")[1]
    assert old == odd.do("_ = at('cuStreamCreate')")
    assert new != old
    assert odd.do(f"_ = call({new}, 1, 2, 3, 4, 5, 6, 7, 8)") == 36
    assert odd.do(f"_ = value({old}, 5)") == 0x1005


def test_calls_of_later_drivers_are_gated(session, odd):
    first = odd.do("_ = get('cuFuture7')")[1]
    assert odd.do("_ = get('cuFuture7')")[1] == first  # the guard returns the same address again
    assert odd.do(f"C.cuInit(0); _ = call({first})") == 1007
    session.page.set_gate(pages.CLOSED)
    odd.send(f"_ = call({first})")
    session.broker.asked(1)
    assert not odd.answers(0.1)
    session.page.set_gate(pages.OPEN)
    assert odd.reply() == 1007


def test_call_is_not_found_if_no_spare_entry_is_left(odd):
    found = odd.do("_ = [get('cuFuture%d' % i) for i in range(300)]")
    assert all(item[::2] == (0, 0) for item in found[:256])
    assert all(item == (0, None, 1) for item in found[256:])  # an unknown name has the same result
    assert odd.do("_ = get('cuFuture299', with_status=False)") == (0, None, 77)
    assert odd.do("_ = get('cuFuture299', form=C.cuGetProcAddress)") == (NOT_FOUND, 77, 77)
    assert len({address for _, address, _ in found[:256]}) == 256
    addresses = [address for _, address, _ in found[:256]]
    assert odd.do(f"_ = [call(a) for a in {addresses}]") == list(range(1000, 1256))
    # The first addresses are still valid.
    assert odd.do("_ = get('cuFuture0')") == (0, addresses[0], 0)
    assert odd.do("_ = get('cuFuture0', form=C.cuGetProcAddress)") == (0, addresses[0], 77)


def test_calls_that_the_driver_lacks_return_not_found(odd):
    assert odd.do("_ = C.cuInit(0), C.cuLaunchKernel(), C.cuEventQuery(None)") == (0, 500, 500)


def test_driver_answers_calls_before_cuinit(session, odd):
    """Before cuInit, the driver answers even the calls that the guard refuses.

    NVIDIA's drivers return 3 for these calls.
    """
    managed = "_ = C.cuMemAllocManaged(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(8), 1)"
    wrong = "ctypes.c_void_p(8)"  # NVIDIA's drivers check no argument before cuInit
    assert odd.do("v = ctypes.c_uint(); _ = C.cuMemAlloc(ctypes.byref(v), 5), v.value") == (0, 5)
    assert odd.do(managed) == NOT_INITIALIZED
    assert odd.do(f"_ = C.cuMemCreate({wrong}, 1, {wrong}, 0)") == NOT_INITIALIZED
    assert odd.do(f"_ = C.cuMemPoolCreate({wrong}, {wrong})") == NOT_INITIALIZED
    assert odd.do("_ = C.cuInit(0)") == 0
    assert odd.do("_ = C.cuMemAlloc(ctypes.byref(v), 5)") == NOT_SUPPORTED
    assert odd.do(managed) == NOT_SUPPORTED
    assert session.slots()[0].pins == 0


def test_uncountable_calls_are_refused_only_in_a_session(session, odd):
    code = "C.cuInit(0); v = ctypes.c_uint(); _ = C.cuMemAlloc(ctypes.byref(v), 5)"
    assert odd.do(code) == NOT_SUPPORTED
    real = odd.do("_ = os.environ['GPUPOOL_REAL_LIBCUDA']")
    other = session.child(GPUPOOL_PAGE=None, GPUPOOL_REAL_LIBCUDA=real)
    assert other.do("v = ctypes.c_uint(); _ = C.cuMemAlloc(ctypes.byref(v), 5), v.value") == (0, 5)


def test_cuda_bindings_run_under_the_guard(session):
    """NVIDIA's own client looks up hundreds of names, makes a context, allocates and copies."""
    code = """
import numpy as np
from cuda.bindings import driver as D
def ok(result):
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]
ok(D.cuInit(0))
c = ok(D.cuDevicePrimaryCtxRetain(ok(D.cuDeviceGet(1))))
ok(D.cuCtxSetCurrent(c))
data = np.arange(1000, dtype=np.uint8); back = np.zeros_like(data)
p = ok(D.cuMemAlloc(1000)); ok(D.cuMemcpyHtoD(p, data.ctypes.data, 1000))
s = ok(D.cuStreamCreate(0)); ok(D.cuMemcpyDtoHAsync(back.ctypes.data, p, 1000, s))
ok(D.cuStreamSynchronize(s)); ok(D.cuMemFree(p)); ok(D.cuStreamDestroy(s))
assert (data == back).all()
print(ok(D.cuDeviceGetCount()))
"""
    for variables in ({}, {"CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM": "1"}):
        assert session.python(code, **variables) == "2"
    assert session.page.gate() == pages.OPEN


def test_cuda_core_runs_under_the_guard(session):
    code = """
import numpy as np
from cuda.core import *
device = Device(0); device.set_current(); stream = device.create_stream()
host = LegacyPinnedMemoryResource().allocate(1 << 20)
view = np.from_dlpack(host).view(np.uint8)
view[:] = np.arange(1 << 20) % 251
want = view.copy()
for resource in (device.memory_resource,
                 DeviceMemoryResource(device, DeviceMemoryResourceOptions(max_size=64 << 20)),
                 VirtualMemoryResource(device, VirtualMemoryResourceOptions(handle_type=None))):
    buffer = resource.allocate(2 << 20, stream=stream)
    part = Buffer.from_handle(int(buffer.handle), 1 << 20)
    part.copy_from(host, stream=stream)
    view[:] = 0
    part.copy_to(host, stream=stream)
    stream.sync()
    assert (view == want).all(), resource
    buffer.close(stream)
print("good")
"""
    assert session.python(code) == "good"
    assert session.slots() == ()


# ---------------------------------------------------------------------- paths to the library


def test_every_library_name_finds_the_same_guard(session, guard_dir):
    found = session.python(
        "import ctypes, json\n"
        "handles = [ctypes.CDLL(n)._handle for n in\n"
        f"    ('libcuda.so.1', 'libcuda.so', {str(guard_dir / 'libcuda.so')!r}, "
        f"{str(guard_build.DEFAULT_OUT / 'libcuda.so.1')!r})]\n"
        "ctypes.CDLL('libcuda.so').cuInit(0)\n"
        "maps = {l.split()[-1] for l in open('/proc/self/maps') if 'libcuda' in l}\n"
        "print(json.dumps([len(set(handles)), sorted(maps)]))"
    )
    guard = os.path.realpath(guard_dir / "libcuda.so.1")
    assert json.loads(found) == [1, sorted([guard, str(library_dir() / "libcuda.so.1")])]


def test_second_copy_of_the_guard_uses_the_first_one(session, tmp_path):
    """Both copies use one gate and one count. So a call that passes through both counts once."""
    copy = tmp_path / "libcuda.so.1"
    shutil.copy(guard_build.DEFAULT_OUT / "libcuda.so.1", copy)
    child = session.child()
    child.do(f"D = C; C = ctypes.CDLL({str(copy)!r})")
    assert child.do("_ = C._handle != D._handle, context(), number(C.cuDeviceGetCount)") == (
        True, 0, 2,
    )  # fmt: skip
    assert child.do("_ = alloc(4 << 20)") > 1000
    (slot,) = session.slots()
    assert slot.used[0] == (32 + 4) << 20
    assert child.do(HELP + "_ = get('cuMemAlloc')[1] == at('cuMemAlloc_v2')") is True
    session.page.set_gate(pages.CLOSED)
    child.send("_ = C.cuCtxSynchronize()")
    session.broker.asked(1)
    assert session.page.read().waiting == 1
    session.page.set_gate(pages.OPEN)
    assert child.reply() == 0


WHICH = """
import ctypes
print(ctypes.CDLL("libcuda.so.1").cuInit(0))
print(*sorted({l.split()[-1] for l in open("/proc/self/maps") if "libcuda" in l}))
"""


def which(session, **variables):
    """Run a process; return cuInit's result, and the paths of all loaded libcuda files.

    The guard itself is left out.
    """
    error, paths = session.python(WHICH, GPUPOOL_PAGE=None, **variables).splitlines()
    guard = os.path.realpath(session.directory / "libcuda.so.1")
    return int(error), [path for path in paths.split() if path != guard]


@pytest.fixture
def copies(tmp_path):
    """Return a folder with a copy of the guard, and two folders with the emulated driver."""
    folders = []
    for name, source in (
        ("guard", guard_build.DEFAULT_OUT), ("one", emulator_build.DEFAULT_OUT),
        ("two", emulator_build.DEFAULT_OUT),
    ):  # fmt: skip
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        shutil.copy(source / "libcuda.so.1", folders[-1])
    return folders


def test_guard_searches_for_the_driver_as_the_loader_does(session, copies):
    guard, one, two = copies
    path = f"{session.directory}:{guard}:/nowhere::{one}:{two}"
    assert which(session, LD_LIBRARY_PATH=path) == (0, [str(one / "libcuda.so.1")])
    path = f"{session.directory}:{two}:{one}"
    assert which(session, LD_LIBRARY_PATH=path) == (0, [str(two / "libcuda.so.1")])


def test_guard_skips_files_that_the_loader_skips(session, copies):
    guard, one, two = copies
    data = bytearray((one / "libcuda.so.1").read_bytes())
    data[18] = 3  # the machine type of another processor
    (guard / "libcuda.so.1").write_bytes(data)
    (one / "libcuda.so.1").write_bytes(b"no library")
    path = f"{session.directory}:{guard}:{one}:{two}"
    assert which(session, LD_LIBRARY_PATH=path) == (0, [str(two / "libcuda.so.1")])


def test_guard_uses_the_search_path_at_the_start_of_the_process(session, copies):
    """The guard uses the LD_LIBRARY_PATH with which the process started, as the loader does.

    A later change of the variable affects only children of the process.
    """
    code = "import os; os.environ.pop('LD_LIBRARY_PATH')\n" + WHICH
    found = session.python(code, LD_LIBRARY_PATH=f"{session.directory}:{copies[1]}")
    assert str(copies[1] / "libcuda.so.1") in found


def test_user_can_name_the_driver(session, copies):
    _, one, two = copies
    path = f"{session.directory}:{one}"
    real = str(two / "libcuda.so.1")
    assert which(session, LD_LIBRARY_PATH=path, GPUPOOL_REAL_LIBCUDA=real) == (0, [real])


@pytest.mark.parametrize("named", ["", "/nowhere/libcuda.so.1", "the guard"])
def test_cuda_reports_no_device_if_no_driver_exists(session, named):
    """Programs continue as on a machine without a GPU."""
    if named == "the guard":
        named = str(session.directory / "libcuda.so.1")
    variables = {"LD_LIBRARY_PATH": str(session.directory), "GPUPOOL_REAL_LIBCUDA": named}
    code = f"""
import ctypes
C = ctypes.CDLL("libcuda.so.1")
{HELP}
print(C.cuInit(0), C.cuInit(0), C.cuCtxSynchronize(), C.cuMemAlloc_v2(None, 1))
print(C.cuDriverGetVersion(ctypes.byref(ctypes.c_int())), call(get("cuInit")[1], 0))
assert get("cuStreamQuery", flags=PER_THREAD) == (0, at("cuStreamQuery_ptsz"), 0)
assert get("cuStreamQuery", form=C.cuGetProcAddress) == (0, at("cuStreamQuery"), 77)
assert get("cuStreamQuery", 6000, PER_THREAD) == (0, None, 2)
assert get("cuNo") == (0, None, 1)
assert get("cuNo", with_status=False) == (0, None, 77)
assert get("cuNo", form=C.cuGetProcAddress) == ({NOT_FOUND}, 77, 77)
assert get("cuInit", flags=4) == (1, 77, 77)
text = ctypes.c_char_p()
assert not C.cuGetErrorName({NO_DEVICE}, ctypes.byref(text))
assert text.value == b"CUDA_ERROR_NO_DEVICE"
assert not C.cuGetErrorString({NO_DEVICE}, ctypes.byref(text))
assert C.cuGetErrorString(3, ctypes.byref(text)) == 1 and text.value is None
assert C.cuGetErrorName(0, None) == 1
"""
    done = session.run(sys.executable, "-c", code.replace("PER_THREAD", "2"), **variables)
    assert done.stdout.split() == [str(NO_DEVICE)] * 6
    assert done.stderr == ""
    assert session.slots() == ()


def test_guard_reads_the_loaders_cache(guard_dir, tmp_path):
    """The test must not change the system's cache, so it compiles the search with another path."""
    assert guard_dir.is_dir()  # the fixture has compiled the emulated driver
    program = tmp_path / "search"
    source = tmp_path / "search.c"
    source.write_text(
        '#include "find.c"\n'
        'int main(void) { struct link_map *found = search_cache("libcuda.so.1");\n'
        '  puts(found ? found->l_name : "none"); return find_library == 0; }\n'
    )
    cache, config, library = tmp_path / "cache", tmp_path / "conf", tmp_path / "lib"
    library.mkdir()
    shutil.copy(emulator_build.DEFAULT_OUT / "libcuda.so.1", library)
    config.write_text(f"{library}\n")
    subprocess.run(["/sbin/ldconfig", "-X", "-C", cache, "-f", config], check=True)
    text = (guard_build.SOURCES / "find.c").read_text()
    assert text.count('"/etc/ld.so.cache"') == 1
    (tmp_path / "find.c").write_text(text.replace("/etc/ld.so.cache", str(cache)))
    subprocess.run(
        ["cc", "-std=gnu11", "-D_GNU_SOURCE", f"-I{tmp_path}", f"-I{guard_build.SOURCES}",
         str(source), "-o", str(program), "-ldl"], check=True,
    )  # fmt: skip
    assert subprocess.check_output([program], text=True).strip() == str(library / "libcuda.so.1")
    cache.write_bytes(cache.read_bytes()[:200])  # the file is damaged now
    assert subprocess.check_output([program], text=True).strip() == "none"
    cache.unlink()
    assert subprocess.check_output([program], text=True).strip() == "none"
