# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Kernels without Python: the guard alone attaches, suspends and resumes them.

The "kernel" is a bash script that starts a compiled program or an R script. jupyter_client starts
the bash script from a kernelspec with the pool's provisioner. The tests exchange files with the
program, so the program does not need to speak the Jupyter protocol.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from . import cells
from .kit import MiB, Sampler, until
from .scenes import DATA, play, release, state, suspended
from .test_lazy import ONE, QUIET, SLICE

SOURCE = Path(__file__).with_name("program.c")

#: The bytes that the program uses on the device: 96 MiB of data and a context of 32 MiB.
PROGRAM = 128 * MiB

COMPILERS = {
    "C": ["cc", "-x", "c"],
    "C++": ["c++", "-x", "c++", "-fpermissive"],
}

R_SCRIPT = """
dyn.load("{library}")
for (n in 1:1000) {{
    path <- file.path("{folder}", n)
    while (!file.exists(path)) Sys.sleep(0.01)
    answer <- .C("use_gpu_from_r", answer = integer(1))$answer
    writeLines(as.character(answer), paste0(path, ".part"))
    file.rename(paste0(path, ".part"), paste0(path, ".done"))
}}
"""


class Program:
    """A kernel without Python. The n-th use of its GPU is the call ``use(n)``."""

    def __init__(self, pool, name, command):
        self.pool, self.label = pool, name
        self.folder = pool.folder / name
        self.folder.mkdir()
        spec = pool.folder / "data" / "kernels" / name
        spec.mkdir(parents=True)
        script = f"{command} {self.folder} & wait"
        (spec / "kernel.json").write_text(
            json.dumps(
                {
                    "argv": ["/bin/bash", "-c", script, "{connection_file}"],
                    "display_name": name,
                    "language": "none",
                    "metadata": {"kernel_provisioner": {"provisioner_name": "gpupool-provisioner"}},
                }
            )
        )

    async def start(self):
        from jupyter_client.manager import AsyncKernelManager

        file = str(self.folder / "connection.json")
        self.manager = AsyncKernelManager(
            kernel_name=self.label, transport="ipc", connection_file=file
        )
        await self.manager.start_kernel(env={**os.environ, "JPY_SESSION_NAME": self.label})
        return self

    def session(self):
        return self.pool.session_of(str(self.manager.kernel_id))

    def ask(self, number):
        (self.folder / str(number)).touch()

    async def answer(self, number):
        path = self.folder / f"{number}.done"
        await until(path.exists, f"answer {number} of {self.label}", show=self.session)
        return int(path.read_text())

    async def use(self, number):
        self.ask(number)
        answer = await self.answer(number)
        assert answer == 0, f"use {number} ended with {answer}"

    async def stop(self):
        await self.manager.shutdown_kernel(now=True)


@pytest.fixture
def program(pool, monkeypatch):
    """Return ``make(pool, language)``, which makes a kernel that is written in that language."""

    def make(pool, language):
        monkeypatch.setenv("JUPYTER_DATA_DIR", str(pool.folder / "data"))
        name = {"C": "c", "C++": "cxx", "R": "r"}[language]
        if language == "R":
            if shutil.which("Rscript") is None:
                pytest.fail("R is not installed: apt-get install r-base-core")
            library = pool.folder / "program.so"
            build = ["cc", "-shared", "-fPIC", "-DLIBRARY", SOURCE, "-o", library, "-ldl"]
            subprocess.run(build, check=True)
            script = pool.folder / "program.R"
            script.write_text(R_SCRIPT.format(library=library, folder=pool.folder / name))
            return Program(pool, name, f"Rscript {script}")
        binary = pool.folder / f"program-{name}"
        subprocess.run([*COMPILERS[language], SOURCE, "-o", binary, "-ldl"], check=True)
        return Program(pool, name, str(binary))

    return make


LANGUAGES = ["C", "C++", pytest.param("R", marks=pytest.mark.long)]


@pytest.mark.parametrize("language", LANGUAGES)
def test_program_without_python_is_suspended_and_resumes(pool, program, language):
    pool = pool(ONE, default_memory=SLICE, quiet_after=QUIET)
    kernel = program(pool, language)

    async def scenario():
        with Sampler(pool) as sampler:
            await kernel.start()
            session = kernel.session()
            assert (session["state"], session["attach"]) == ("detached", "lazy")
            assert not session["agent"]
            assert session["granted_bytes"] == 0, "nothing before the first CUDA call"
            await kernel.use(1)
            session = await state(kernel, "idle")
            assert session["used_bytes"] == PROGRAM
            assert session["granted_bytes"] == SLICE
            # The device has room for one slice. So the other kernel's cell suspends the program.
            other = await pool.kernel("other")
            (await other.run(cells.setup(2, DATA))).check()
            session = await suspended(kernel)
            assert session["suspended_bytes"] >= PROGRAM
            await kernel.use(2)
            session = kernel.session()
            assert (session["suspends"], session["resumes"]) == (1, 1)
            (await other.run("block.verify()")).check()
            for number in range(3, 6):
                await release(pool, kernel)
                await kernel.use(number)
            (await other.run("block.verify()")).check()
            await kernel.stop()
            await pool.stop_kernels()
        sampler.check(at_least=5)

    play(scenario())


def test_program_that_ends_at_the_gate_leaves_the_queue(pool, program):
    pool = pool(ONE, default_memory=SLICE)
    flag = pool.folder / "go"
    kernel = program(pool, "C")

    async def scenario():
        busy = await pool.kernel("busy")
        work = asyncio.create_task(busy.run(cells.setup(1, DATA) + cells.computing(flag)))
        await state(busy, "active")
        await kernel.start()
        kernel.ask(1)
        session = await state(kernel, "queued")
        assert session["queue_position"] == 1
        assert session["wait_reason"]
        assert not (kernel.folder / "1.done").exists()
        flag.touch()
        (await work).check()
        assert await kernel.answer(1) == 0
        await kernel.use(2)
        (await busy.run("block.verify()")).check()
        await kernel.stop()
        await until(lambda: kernel.session() is None, "the program's session to end")
        await pool.stop_kernels()

    play(scenario())


def test_a_program_that_is_killed_while_suspended_leaves_nothing(pool, program):
    pool = pool(ONE, default_memory=SLICE)
    kernel = program(pool, "C")

    async def scenario():
        await kernel.start()
        await kernel.use(1)
        await release(pool, kernel)
        for process in psutil.Process(kernel.manager.provisioner.pid).children(recursive=True):
            process.kill()
        await kernel.stop()
        await until(lambda: not pool.sessions(), "the session to end")

    play(scenario())
