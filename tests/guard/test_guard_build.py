# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tests of the guard's compilation, of the library's content, and of its cost without CUDA."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpupool.guard import build
from jupyter_gpupool.guard import page as pages
from tests.emulated import build as emulator_build

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def generator():
    return build.generator


@pytest.fixture(scope="module")
def entries(generator):
    return generator.read(build.ENTRIES)


def tool(*command):
    """Return the output of a program of the binutils."""
    return subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, text=True, timeout=60
    ).stdout


# ---------------------------------------------------------------------- compiling


def test_only_stale_libraries_are_compiled(tmp_path, monkeypatch, quick_compiler):
    monkeypatch.setenv("CC", quick_compiler)
    build.compile(tmp_path)
    target = tmp_path / "libcuda.so.1"
    before = target.stat().st_ino
    monkeypatch.setenv("CC", f"{sys.executable} -c raise")  # a compiler that fails if it runs
    build.compile(tmp_path)
    assert target.stat().st_ino == before
    monkeypatch.setenv("CC", quick_compiler)
    os.utime(target, (1, 1))
    build.compile(tmp_path)
    assert target.stat().st_ino != before
    assert all(path.name in build.libraries() for path in tmp_path.iterdir())


def test_missing_compiler_is_reported_with_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(build.CompilerMissing, match="Install gcc or clang"):
        build.compile(tmp_path)
    assert build.main(["--out", str(tmp_path)]) == 1
    assert "'no-such-compiler' is not on PATH" in capsys.readouterr().err


def test_error_on_another_processor_names_the_alternative(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(build.CompilerMissing, match=r'aarch64.*attach = "cell"'):
        build.compile(tmp_path)


def test_command_accepts_the_warnings_of_a_newer_compiler(tmp_path, monkeypatch, capfd):
    """Users also run this command: the error for a missing library tells them to."""
    monkeypatch.setenv("CC", "cc -Wpadded")
    assert build.main(["--out", str(tmp_path)]) == 0
    assert "-Wpadded" in capfd.readouterr().err


def test_failing_compiler_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CC", "false")
    assert build.main(["--out", str(tmp_path)]) == 1
    assert "failed with status 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_unwritable_directory_is_reported(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert build.main(["--out", str(tmp_path / "file" / "lib")]) == 1
    assert "--out" in capsys.readouterr().err


def test_package_build_needs_only_the_standard_library():
    """When pip builds the package, the requirements of the package are not installed."""
    root = str(Path(build.__file__).parents[2])
    code = (
        f"import sys; sys.path.insert(0, {root!r}); "
        "import emucuda.build, jupyter_gpupool.guard.build as build; "
        "build.compiler()"
    )
    subprocess.run([sys.executable, "-ISc", code], check=True, timeout=60)


# ---------------------------------------------------------------------- the list of entries


@pytest.mark.parametrize(
    "line",
    ["cuInit", "cuInit 2000", "cuInit x wrap", "cuInit 2000 gates", "init 2000 gate",
     "cuInit 2000 gate 3", "cuInit 2000 wait", "cuInit 2000 wait x", "cuInit 2000 same",
     "cuInit 2000 back", "cuInit 2000 back 4", "cuInit 2000 note 4",
     "cuOther 2000 gate", "cuInit 2000 same cuOther"],
)  # fmt: skip
def test_invalid_line_in_the_entries_file_is_refused(generator, tmp_path, line):
    path = tmp_path / "entries.txt"
    path.write_text(f"# comment\ncuOther 2000 gate # comment\n\n{line}\n")
    with pytest.raises(generator.EntriesError):
        generator.read(path)


def test_functions_and_entries_must_match(generator, entries):
    wraps = {e.symbol for e in entries if e.kind in ("wrap", "peek", "launch")}
    assert generator.generate(entries, wraps)
    with pytest.raises(generator.EntriesError, match=r"without a C function: .*cuInit"):
        generator.generate(entries, wraps - {"cuInit"})
    with pytest.raises(generator.EntriesError, match=r"without an entry: .*cuLaunchHostFunc"):
        generator.generate(entries, wraps | {"cuLaunchHostFunc"})


def test_calls_that_wait_or_allocate_have_the_right_kind(entries):
    """A call that waits for the device, allocates or frees must not have the kind ``gate``."""
    kinds = {e.symbol: e.kind for e in entries}
    sync = re.compile(
        r"cu(Ctx|Stream|Event)Synchronize|cu(Stream|Event)Query"
        r"|cuMem(cpy|set)(?!.*Async)|cu(Module|Library)Unload|cuMemFreeHost"
    )
    alloc = re.compile(
        r"cuMem(Alloc(?!Host)|Create|Free(?!Host)|PoolCreate|PoolTrim)|cu\w*Array3?D?(Create|Destroy)"
        r"|cuCtxCreate|cuDevicePrimaryCtx(Retain|Release|Reset)|cuIpc(Get|Open)"
        r"|cuGraph(Launch|Instantiate)|cuMemGetInfo|cuDeviceTotalMem|cuGetProcAddress|cuInit"
    )
    for symbol, kind in kinds.items():
        if sync.match(symbol):
            assert kind in ("wait", "wrap", "back"), symbol
        if alloc.match(symbol):
            assert kind in ("wrap", "same", "refuse") or symbol == "cuMemFree", symbol
    # The old cuMemFree needs no wrapper. It takes a 32-bit address, and the guard refuses all calls
    # that return a 32-bit address.
    assert kinds["cuMemFree"] == "back"
    assert kinds["cuLaunchKernel"] == "launch"
    assert kinds["cuCheckpointProcessLock"] == "never"


def test_per_thread_variant_has_the_same_kind_as_its_call(entries):
    """A call and its per-thread variant have the same kind."""
    kinds = {e.symbol: (e.kind, e.arguments) for e in entries}
    for entry in entries:
        if entry.per_thread:
            plain = entry.symbol.rsplit("_", 1)[0]
            assert kinds[plain] == kinds[entry.symbol], entry.symbol


def test_guard_knows_the_names_that_nvidias_bindings_ask_for(entries):
    """The list of entries has the names in NVIDIA's cuda-bindings and in the emulated driver."""
    spec = importlib.util.find_spec("cuda.bindings._internal.driver")
    text = Path(spec.origin).read_bytes()
    asked = {
        name.decode()
        for name in re.findall(rb"\0(cu[A-Z][A-Za-z0-9]+)(?=\0)", text)
    } - {b""}  # fmt: skip
    known = {e.base for e in entries} | {e.symbol for e in entries}
    assert len(asked) > 300
    assert {name for name in asked if re.match(r"cu(Mem|Ctx|Device|Stream|Graph)", name)} <= known
    emulator_build.compile()
    path = emulator_build.DEFAULT_OUT / "libcuda.so.1"
    exported = set(re.findall(r" T (cu\w+)", tool("nm", "-D", "--defined-only", path)))
    assert exported <= {e.symbol for e in entries}


# ---------------------------------------------------------------------- the entry points


def test_arguments_and_registers_reach_the_driver_unchanged(generator, tmp_path):
    """The program tests registers, stack, alignment and unwinding for each kind of entry."""
    made = tmp_path / "entries.txt"
    made.write_text(
        "cuGate 1 gate\ncuFree 1 free\ncuNever 1 never\ncuRefuse 1 refuse\ncuWrap 1 wrap\n"
        "cuSame 1 same cuWrap\ncuWait3 1 wait 3\ncuWait17 1 wait 17\ncuWait24 1 wait 24\n"
        "cuBack 1 back 3\ncuPeek 1 peek\ncuNote 1 note 3\n"
    )
    for name, text in generator.generate(generator.read(made), {"cuWrap", "cuPeek"}).items():
        (tmp_path / name).write_text(text)
    program = tmp_path / "entry_points"
    for optimise in ("-O0", "-O2"):
        subprocess.run(
            ["cc", "-std=gnu11", "-D_GNU_SOURCE", "-g", optimise, "-fno-omit-frame-pointer",
             "-rdynamic", "-Wall", "-Wextra", "-Werror", "-Wno-cast-function-type",
             f"-I{tmp_path}", f"-I{build.SOURCES}", str(HERE / "entry_points.c"),
             str(tmp_path / "entries_gen.S"), "-o", str(program)], check=True,
        )  # fmt: skip
        done = subprocess.run([program], capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == "right\n"
        assert done.returncode == 0


# ---------------------------------------------------------------------- the library


@pytest.fixture(scope="module")
def library(guard_dir):
    return (guard_dir / "libcuda.so.1").resolve()


def test_library_has_the_drivers_name(library):
    dynamic = tool("readelf", "-dW", library)
    assert "Library soname: [libcuda.so.1]" in dynamic
    assert re.findall(r"NEEDED.*\[(.*)\]", dynamic) in (["libc.so.6"], ["libdl.so.2", "libc.so.6"])
    assert "SYMBOLIC" in dynamic
    assert "NODELETE" in dynamic
    assert "BIND_NOW" not in dynamic
    assert "TEXTREL" not in dynamic
    # The compiler adds one constructor, and its entry has 8 bytes. The guard must add no
    # constructor.
    assert re.findall(r"INIT_ARRAYSZ\)\s+(\d+)", dynamic) == ["8"]
    assert re.search(r"GNU_STACK .* RW +0x", tool("readelf", "-lW", library))


def test_only_known_names_are_exported(library, entries):
    exported = set(re.findall(r" [A-Z] (\w+)", tool("nm", "-D", "--defined-only", library)))
    own = {"gpupool_guard", "gpupool_page", "gpupool_nvml_enter", "gpupool_nvml_leave"}
    own |= {"mmap", "mmap64"}
    assert exported == {e.symbol for e in entries} | own


def test_no_private_symbol_of_the_c_library_is_used(library):
    wanted = tool("nm", "-D", "--undefined-only", library)
    assert "GLIBC_PRIVATE" not in wanted
    versions = [tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", wanted)]
    assert versions
    assert not re.search(r" U (malloc|calloc|realloc|free|strdup)\b", wanted)


def test_library_has_far_fewer_relocations_than_entries(library, entries):
    """The loader writes to memory for each relocation, also in a process that never calls CUDA."""
    relocations = re.findall(r"^[0-9a-f]+ .*R_X86_64_", tool("readelf", "-rW", library), re.M)
    assert len(relocations) < len(entries) / 4


def test_process_that_never_calls_cuda_only_maps_the_guard(session):
    done = session.run("/bin/cat", "/proc/self/maps")
    mapped = {line.split()[-1] for line in done.stdout.splitlines() if "libcuda" in line}
    assert mapped == {str((session.directory / "libcuda.so.1").resolve())}
    assert done.stderr == ""
    assert session.slots() == ()
    assert session.page.gate() == pages.UNUSED
    # The process opens no page and makes no connection.
    done = session.run("/bin/ls", "-l", "/proc/self/fd", GPUPOOL_PAGE="/nowhere")
    assert done.stderr == ""


def test_python_and_c_agree_on_the_layout_of_the_page(tmp_path):
    program = tmp_path / "layout"
    source = tmp_path / "layout.c"
    fields = ("gate", "managed", "contended", "devices", "epoch", "pause_until", "limit",
              "context_bytes", "granted", "uuid", "session", "room", "vain", "vain_until",
              "slot")  # fmt: skip
    lines = "".join(f'printf("%zu ", offsetof(struct page, {name}));' for name in fields)
    lines += "".join(
        f'printf("%zu ", offsetof(struct page_slot, {name}));'
        for name in ("sees", "landing", "nvml")
    )
    lines += 'printf("%llu ", (unsigned long long)page_name("GPU-0123"));'
    source.write_text(
        "#include <stddef.h>\n#include <stdio.h>\n#include \"page.h\"\n"
        f"int main(void) {{ {lines} printf(\"%zu %zu %u %u %u\", sizeof(struct page),"
        " sizeof(struct page_slot), PAGE_MAGIC, PAGE_VERSION, PAGE_SLOTS); return 0; }}\n"
        .replace("}}", "}")
    )  # fmt: skip
    subprocess.run(["cc", f"-I{build.SOURCES}", source, "-o", program], check=True)
    assert [int(n) for n in tool(program).split()] == [
        pages.GATE_AT, pages.MANAGED_AT, pages.CONTENDED_AT, pages.DEVICES_AT, pages.EPOCH_AT,
        pages.PAUSE_AT, pages.LIMIT_AT, pages.CONTEXT_AT, pages.GRANTED_AT, pages.UUID_AT,
        pages.SESSION_AT, pages.ROOM_AT, pages.VAIN_AT, pages.VAIN_UNTIL_AT, pages.HEADER_BYTES,
        pages.SEES_AT, pages.LANDING_AT, pages.NVML_AT, pages.device_name("GPU-0123"),
        pages.SIZE, pages.SLOT_BYTES, pages.MAGIC, pages.VERSION, pages.SLOTS,
    ]  # fmt: skip
