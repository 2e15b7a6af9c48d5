# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Each quirk of the emulated driver, as NVIDIA's clients see it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.emulator.asking import WORKER, on_devices

MiB = 1 << 20
HAS = 40 * MiB  # including the context

MORE = """
def used(i=0):
    return n.nvmlDeviceGetMemoryInfo(handle(i), version=n.nvmlMemory_v2).used
def other():
    uuids = [n.nvmlDeviceGetUUID(handle(i))[4:] for i in range(2)]
    return dict(zip(uuids, uuids[::-1]))
_ = 1
"""


class Trio:
    """A machine with two processes: ``target`` has 8 MiB on device 0; ``worker`` observes it."""

    def __init__(self, machine):
        self.faults = machine.faults
        self.machine = machine
        self.target, self.worker = machine.target(), machine.target()
        self.worker.do(WORKER + MORE)
        self.target.do("context(); p = ok(D.cuMemAlloc(8 << 20)); put(p, bytes_of(8 << 20))")
        self.want = self.target.do("_ = get(p, 8 << 20)")

    def call(self, name, *args):
        return self.worker.do(f"_ = call({self.target.pid}, {name!r}, *{args!r})")

    def ask(self, text):
        return self.worker.do(f"_ = {text}")

    def state(self):
        return self.ask(f"Process({self.target.pid}).state")

    def listed(self, device=0):
        return self.ask(f"listed({device})").get(self.target.pid)

    def suspend(self):
        assert self.call("lock", 1000) is None
        assert self.call("checkpoint") is None

    def resume(self, *mapping):
        assert self.call("restore", *mapping) is None
        assert self.call("unlock") is None
        assert self.target.do("_ = get(p, 8 << 20)") == self.want


@pytest.fixture
def trio(emulated):
    return Trio(emulated("2x256MiB,context=32MiB"))


def test_residue_counts_as_used_but_belongs_to_no_process(trio):
    trio.faults.set("residue", device=0, bytes="100MiB")
    assert (trio.ask("used()"), trio.listed()) == (HAS + 100 * MiB, HAS)
    assert trio.ask("used(1)") == 0
    # A process cannot allocate the residue: 256 - 100 - 32 (context) - 8 = 116 MiB are left.
    assert trio.target.do("_ = D.cuMemAlloc(118 << 20)[0].name") == "CUDA_ERROR_OUT_OF_MEMORY"
    assert trio.target.do("_ = D.cuMemAlloc(116 << 20)[0].name") == "CUDA_SUCCESS"


def test_quirk_makes_nvml_report_too_little_memory_of_a_process(trio):
    trio.faults.set("nvml-less", bytes="30MiB")
    assert (trio.ask("used()"), trio.listed()) == (HAS, HAS - 30 * MiB)


def test_nvml_waits_for_a_copy_to_end(trio, until):
    trio.faults.set("nvml-waits")
    trio.faults.set("slow-copies", bandwidth="8MiB/s")
    assert trio.call("lock", 1000) is None
    other = trio.machine.target()
    other.do(WORKER)
    before = on_devices(trio.target.pid)
    other.send(f"_ = call({trio.target.pid}, 'checkpoint')")
    until(lambda: on_devices(trio.target.pid) < before)
    # The worker's NVML call begins during the copy and returns after it.
    assert trio.ask("used()") == 0
    assert other.reply() is None


def test_quirks_make_nvml_add_and_remove_a_process_late(trio):
    trio.faults.set("nvml-late", ms=3_600_000)
    assert trio.listed() is None
    trio.faults.clear()
    trio.suspend()
    assert trio.listed() is None
    trio.faults.set("nvml-lag", ms=3_600_000)
    assert (trio.ask("used()"), trio.listed()) == (0, HAS)
    trio.faults.set("nvml-lag", ms=0)
    assert trio.listed() is None


@pytest.mark.parametrize("size", [0, 4 * MiB])
def test_a_suspended_process_may_keep_memory(trio, size):
    trio.faults.set("suspend-keeps", bytes=size)
    trio.suspend()
    assert (trio.ask("used()"), trio.listed()) == (size, size)
    mapping = trio.ask("other()")
    trio.resume(mapping)
    assert [trio.ask(f"used({i})") for i in range(2)] == [0, HAS]


def test_a_failed_restore_may_leave_the_process_checkpointed(trio):
    trio.faults.set("restore-keeps-state")
    trio.suspend()
    trio.faults.set("restore-failed", count=1)
    assert trio.call("restore") == "CUDA_ERROR_OPERATING_SYSTEM"
    assert (trio.state(), trio.ask("used()")) == ("checkpointed", 0)
    hog = trio.machine.target()
    hog.do("context(); q = ok(D.cuMemAlloc(200 << 20))")
    assert trio.call("restore") == "CUDA_ERROR_OUT_OF_MEMORY"
    assert (trio.state(), trio.ask("used()")) == ("checkpointed", 232 * MiB)
    hog.kill()
    trio.resume()


def test_a_restored_process_may_have_more_memory(trio):
    trio.faults.set("restore-more", bytes="16MiB", count=1)
    trio.suspend()
    trio.resume()
    assert trio.listed() == HAS + 16 * MiB
    trio.suspend()
    trio.resume()
    assert trio.listed() == HAS + 16 * MiB


@pytest.mark.parametrize(("code", "says"), [(801, "not supported"), (1, "CUDA_ERROR_INVALID")])
def test_a_restore_onto_another_device_may_be_refused(trio, code, says):
    trio.faults.set("migration-refused", code=code)
    trio.suspend()
    mapping = trio.ask("other()")
    assert says in trio.call("restore", mapping)
    assert trio.state() == "checkpointed"
    trio.resume()


def test_cuinit_alone_allows_a_suspend_only_without_the_quirk(trio):
    trio.faults.set("init-not-enough")
    trio.target = trio.machine.target()
    trio.target.do("ok(D.cuInit(0))")
    assert "CUDA_ERROR_NOT_INITIALIZED" in trio.call("lock", 1)
    trio.faults.clear()
    trio.target = trio.machine.target()
    trio.target.do("ok(D.cuInit(0))")
    assert trio.ask(f"Process({trio.target.pid}).restore_thread_id") > 0
    trio.suspend()
    assert trio.state() == "checkpointed"
    assert trio.call("restore") is None
    assert trio.call("unlock") is None


def test_a_lock_may_ignore_its_timeout(trio):
    trio.faults.set("lock-ignores-timeout")
    trio.worker.send(f"_ = call({trio.target.pid}, 'lock', 1)")
    assert trio.worker.hangs(0.2)
    trio.faults.clear()
    assert trio.worker.reply() is None
    assert trio.state() == "locked"


def test_unknown_faults_in_the_environment_are_reported(emulated):
    """The driver prints an error for a misspelt fault, because the fault has no effect."""
    variables = {"EMUCUDA_FAULTS": "nonsense bytes=3; ;residue bytes=8MiB"}
    done = subprocess.run(
        [sys.executable, "-c", "import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))"],
        env={**os.environ, **emulated("1x1GiB").env, **variables},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == "0\n"
    assert done.stderr == ("emucuda: EMUCUDA_FAULTS: unknown fault 'nonsense'.\n")
