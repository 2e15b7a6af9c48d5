# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Many threads allocate in every way at the same time (``race.c``), also with sanitizers."""

import subprocess

import pytest

from jupyter_gpupool.guard import build
from tests.emulated import build as emulator_build

MIB = 1 << 20
#: Size of a context. Most requests have another size, so bytes that the guard loses rarely look
#: like a context.
CONTEXT = 2 * MIB
#: The limit of the session. The largest request exceeds it, so the guard refuses some requests even
#: if only one thread allocates.
LIMIT = CONTEXT + 64 * MIB


@pytest.fixture
def race(make_session, compiled):
    """Return a function that runs the program and returns how many requests were refused."""
    session = make_session("1x1GiB,context=2MiB")
    session.page.set_policy(managed=False, context_bytes=CONTEXT)
    session.grant(session.uuids, each=LIMIT, limit=LIMIT)
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}

    def run(seed, rounds, *flags, **variables):
        program = compiled("race", f"-I{build.SOURCES}", "-pthread", "-ldl", *flags)
        done = session.run(program, seed, rounds, check=False, **variables)
        assert done.returncode == 0, (done.returncode, done.stdout, done.stderr[-5000:])
        refusals, available, total = map(int, done.stdout.split())
        assert (available, total) == (LIMIT - CONTEXT, LIMIT)  # only the context is left
        assert session.slots() == ()
        return refusals

    return run


@pytest.mark.parametrize("seed", range(3))
def test_racing_allocations_leave_no_bytes_counted(race, seed):
    assert race(seed, 1000) > 0  # the grant was full at times


@pytest.fixture(scope="module", params=["address", "thread"])
def instrumented(request, tmp_path_factory):
    """Build guard and driver with a sanitizer; return flags and variables for programs."""
    folder = tmp_path_factory.mktemp(request.param)
    build.compile(folder / "guard", sanitize=request.param)
    emulator_build.compile(folder / "driver", sanitize=request.param, only=["libcuda.so.1"])
    runtime = {"address": "libasan.so", "thread": "libtsan.so"}[request.param]
    found = subprocess.run(
        ["cc", f"-print-file-name={runtime}"],
        capture_output=True, text=True, timeout=30, check=True,
    ).stdout.strip()  # fmt: skip
    return f"-fsanitize={request.param}", {
        "LD_PRELOAD": f"{found}:{folder / 'guard' / 'libcuda.so.1'}",
        "LD_LIBRARY_PATH": f"{folder / 'guard'}:{folder / 'driver'}",
        # No search for leaks: the driver does not free the handles of destroyed contexts.
        "ASAN_OPTIONS": "halt_on_error=1:detect_leaks=0",
        "TSAN_OPTIONS": "halt_on_error=1",
    }


@pytest.mark.long
def test_racing_allocations_pass_the_sanitizers(race, instrumented):
    flag, variables = instrumented
    race(7, 150, flag, **variables)
