# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A cell may set ``os.environ["CUDA_VISIBLE_DEVICES"] = "1"``, as many notebooks do."""

from __future__ import annotations

import pytest

from . import cells
from .scenes import play

#: Counts GPUs like torch.cuda.device_count() before CUDA is initialised: the count comes from the
#: variable and from NVML.
COUNT = """
import pynvml
def count():
    pynvml.nvmlInit()
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return pynvml.nvmlDeviceGetCount()
    found = 0
    for entry in text.split(","):
        if entry.startswith("GPU-"):
            pynvml.nvmlDeviceGetHandleByUUID(entry)
        elif not 0 <= int(entry or -1) < pynvml.nvmlDeviceGetCount():
            break
        found += 1
    return found
"""


@pytest.mark.parametrize("value", ["1", "7", "2,3", "GPU-00000000-0000-0000-0000-000000000000"])
def test_index_beyond_the_slice_selects_its_own_gpu(pool, value):
    pool = pool("2x512MiB,context=32MiB", default_memory="200MiB")

    async def scenario():
        kernel = await pool.kernel()
        cell = f"import os\nos.environ['CUDA_VISIBLE_DEVICES'] = {value!r}\nSEED = 1\n"
        first = (await kernel.run(cell + cells.DEFINE + COUNT + "print('count', count())")).check()
        assert "count 1" in first.text
        said = [line for line in first.text.splitlines() if "names a GPU" in line]
        assert len(said) == 1, first.text
        again = await kernel.run("block = Block(16).allocate().write(1).verify()\nprint(count())")
        assert "names a GPU" not in again.check().text
        assert again.text.strip() == "1"
        # CUDA is initialised, so a new value of the variable has no effect. The kernel shows the
        # message about it once more.
        late = (
            await kernel.run("os.environ['CUDA_VISIBLE_DEVICES'] = '5'\nblock.verify()")
        ).check()
        assert late.text.count("names a GPU") == 1
        # After that, a child process of the kernel still finds the kernel's GPU.
        code = "import ctypes; print('child', ctypes.CDLL('libcuda.so.1').cuInit(0))"
        child = (
            await kernel.run(
                f"import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', {code!r}],"
                "env={**os.environ}, capture_output=True, text=True))"
            )
        ).check()
        assert "child 0" in child.text
        assert "names a GPU" not in child.text
        await pool.stop_kernels()

    play(scenario())


@pytest.mark.parametrize("value", ["", "-1"])
def test_variable_without_a_gpu_hides_all_gpus(pool, value):
    pool = pool("2x512MiB,context=32MiB", default_memory="200MiB")

    async def scenario():
        kernel = await pool.kernel()
        cell = await kernel.run(
            f"import os, ctypes\nos.environ['CUDA_VISIBLE_DEVICES'] = {value!r}\n"
            "print('cuInit', ctypes.CDLL('libcuda.so.1').cuInit(0))"
        )
        assert "cuInit 100" in cell.check().text
        assert "names a GPU" not in cell.text
        await pool.stop_kernels()

    play(scenario())


@pytest.mark.parametrize(("value", "seen"), [("1", [1]), ("1,0", [1, 0]), ("0,1", [0, 1])])
def test_cell_can_choose_among_the_gpus_of_its_slice(pool, value, seen):
    pool = pool("2x512MiB,context=32MiB", default_memory="200MiB")
    code = """
import os, pynvml
print("count", count())
os.environ["CUDA_VISIBLE_DEVICES"] = VALUE
cu = ctypes.CDLL("libcuda.so.1")
assert cu.cuInit(0) == 0
found, number, uuid = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
assert cu.cuDeviceGetCount(ctypes.byref(number)) == 0
names = []
for ordinal in range(number.value):
    assert cu.cuDeviceGet(ctypes.byref(found), ordinal) == 0
    assert cu.cuDeviceGetUuid_v2(uuid, found) == 0
    names.append("GPU-" + str(__import__("uuid").UUID(bytes=bytes(uuid))))
print("names", ",".join(names))
""".replace("VALUE", repr(value))

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run("%gpu devices 2")).check()
        ran = (await kernel.run("import ctypes, os\n" + COUNT + code)).check()
        assert "names a GPU" not in ran.text
        assert "count 2" in ran.text
        there = [device["uuid"] for device in pool.devices()]
        names = ran.text.partition("names ")[2].strip().split(",")
        assert [there.index(name) for name in names] == seen
        await pool.stop_kernels()

    play(scenario())
