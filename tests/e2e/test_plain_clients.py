# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Clients without provisioners: like VS Code, they run the argv of a kernelspec themselves."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from jupyter_gpupool.kernelspecs import wrap
from tests.plain_client import SHIPPED, PlainKernel

from . import cells
from .kit import MiB, wait_for

ONE = "1x512MiB,context=32MiB"
SLICE = 320 * MiB  # a GPU has no room for two of these
DATA = 40

SHARE = Path(__file__).parents[2] / "share" / "jupyter"


@pytest.fixture
def start(monkeypatch):
    made = []
    monkeypatch.setenv("JUPYTER_PATH", str(SHARE))

    def start(pool, name=SHIPPED, **options):
        made.append(PlainKernel(name, pool.folder, **options))
        return made[-1]

    yield start
    for kernel in made:
        kernel.close()


def session(pool, kernel):
    return next((s for s in pool.sessions() if s["pid"] == kernel.pid), None)


def in_state(pool, kernel, state):
    return wait_for(
        lambda: (s := session(pool, kernel)) and s["state"] == state and s,
        f"the kernel to be {state}",
        show=lambda: session(pool, kernel),
    )


def test_kernels_of_plain_clients_share_a_gpu(pool, start):
    pool = pool(ONE, default_memory=SLICE, resume_headroom=0)
    first, second = start(pool, vscode=True), start(pool)
    for number, kernel in enumerate((first, second)):
        assert "Error" not in kernel.run(cells.setup(number + 1, DATA))
    assert in_state(pool, first, "detached")["suspended_bytes"] >= DATA * MiB
    # Each cell resumes its kernel, so the broker suspends the other kernel.
    for kernel in (first, second):
        assert "Error" not in kernel.run("block.verify().compute().verify()")
    assert session(pool, first)["resumes"] == session(pool, second)["resumes"] == 1
    assert "MiB" in first.run("%gpu")
    assert "GPU pool" not in first.stderr + second.stderr
    # Interrupt and restart the second kernel like such a client. An interrupt is a signal to the
    # process. A restart ends the process and starts another one.
    running = second.client.execute(f"print('in', flush=True)\n{cells.busy(pool.folder / 'never')}")
    # Wait for the cell's output: a kernel reports busy before an interrupt can stop the cell.
    wait_for(lambda: "in" in second.printed(running), "the cell to run")
    second.process.send_signal(signal.SIGINT)
    assert second.reply(running)["content"]["ename"] == "KeyboardInterrupt"
    old = session(pool, second)["id"]
    second.close()
    again = start(pool)
    assert "Error" not in again.run(cells.setup(3, DATA))
    assert old not in [s["id"] for s in pool.sessions()]
    assert session(pool, again)["state"] in ("active", "idle")
    assert "Error" not in first.run("block.verify()")


#: A kernel without IPython and without an agent. It allocates device memory at its start.
PROGRAM = """
import ctypes, sys, pathlib
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, (name, result)
device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(64 << 20))
pathlib.Path(sys.argv[1]).with_suffix(".done").write_text("done")
sys.stdin.read()
"""


def test_broker_started_by_the_launcher_outlives_its_kernel(pool, start, monkeypatch):
    """No broker runs, so the kernel's launcher starts one. The broker outlives the kernel."""
    pool = pool(ONE, default_memory=SLICE)
    os.kill(pool.status()["pid"], signal.SIGTERM)
    wait_for(lambda: not pool.socket.exists(), "the broker to end")
    folder = pool.folder / "data" / "kernels" / "program"
    folder.mkdir(parents=True)
    spec = {"argv": [sys.executable, "-c", PROGRAM, "{connection_file}"], "language": "none"}
    (folder / "kernel.json").write_text(json.dumps({**spec, "display_name": "Program"}))
    monkeypatch.setenv("JUPYTER_PATH", str(pool.folder / "data"))
    wrap("program", prefix=str(pool.folder / "twins"))
    monkeypatch.setenv("JUPYTER_PATH", str(pool.folder / "twins" / "share" / "jupyter"))
    kernel = start(pool, "gpupool-program")
    done = kernel.file.with_suffix(".done")
    wait_for(done.exists, "the program to have its memory", show=lambda: kernel.stderr)
    found = session(pool, kernel)
    assert found["state"] in ("active", "idle")
    assert found["granted_bytes"] == SLICE
    assert found["label"].endswith(": Program (Pooled GPU)")
    broker = psutil.Process(pool.status()["pid"])
    assert kernel.pid not in [p.pid for p in broker.parents()]
    assert psutil.Process(kernel.pid).children(recursive=True) == []  # a zombie would count, too
    kernel.close()
    wait_for(lambda: pool.sessions() == [], "its session to end")
    assert broker.is_running()


def test_refused_kernel_finds_no_gpu_and_says_why(pool, start, monkeypatch):
    pool = pool(ONE, default_memory=SLICE)
    folder = pool.folder / "data" / "kernels" / SHIPPED
    folder.mkdir(parents=True)
    spec = json.loads((SHARE / "kernels" / SHIPPED / "kernel.json").read_text())
    spec["metadata"]["kernel_provisioner"]["config"] = {"memory": "10GiB"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(pool.folder / "data"))
    kernel = start(pool, **pool.driver_env)  # a driver exists, but the pool refuses the kernel
    said = kernel.run(f"SEED = 1\n{cells.DEFINE}\nprint(driver.cuInit(0))")
    assert "GPU pool: this kernel runs without a GPU: 10 GiB was asked for" in said
    assert "CUDA_ERROR_NO_DEVICE" in said
    assert pool.sessions() == []
