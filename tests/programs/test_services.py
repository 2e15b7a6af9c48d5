# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Four services and a notebook share one GPU. Each of the five needs a fifth of its memory."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jupyter_gpupool.cli import commands
from jupyter_gpupool.programs import runfiles
from tests.e2e import cells
from tests.e2e.conftest import installed, kernelspec, pool, rested  # noqa: F401
from tests.e2e.kit import MiB, until

from .runkit import CLI

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "examples" / "services" / "gpupool-service@.service"

#: The machine, and the MiB of a fifth of its GPU. Each service and the notebook get a fifth.
MACHINE, FIFTH = "1x1000MiB,context=16MiB", 196

MODEL, REQUESTS = 120, 20


class Service:
    """A client of one service."""

    def __init__(self, pool, number):  # noqa: F811
        self.path = pool.folder / f"svc{number}"
        self.name = f"svc{number}"
        words = ["--memory", f"{FIFTH}MiB", "--limit", f"{FIFTH}MiB", "--compute", "20"]
        command = [sys.executable, "-m", "tests.programs.service", str(self.path), str(MODEL)]
        done = subprocess.run(
            [*CLI, "run", "-d", "--name", self.name, *words, "--", *command, str(number)],
            cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout.strip()) == (0, self.name), done.stderr
        self.key = number
        self.lines = None

    def log(self):
        return b"".join(runfiles.read_log(self.name)).decode()

    async def connect(self):
        await until(self.path.exists, "the service", show=self.log)
        self.lines = await asyncio.open_unix_connection(str(self.path))

    async def ask(self, **request):
        reader, writer = self.lines
        writer.write(json.dumps(request).encode() + b"\n")
        line = await asyncio.wait_for(reader.readline(), 60)
        assert line, self.log()
        return json.loads(line)

    async def serve(self):
        """Send many requests, one after the other; return the seconds of the slowest answer."""
        longest = 0.0
        for number in range(REQUESTS):
            word = number * 7919
            began = time.monotonic()
            answer = await self.ask(ns=2_000_000, word=word)
            longest = max(longest, time.monotonic() - began)
            assert answer == word * 2654435761 + self.key
        return longest

    def close(self):
        if self.lines is not None:
            self.lines[1].close()


@pytest.fixture
def end_programs(monkeypatch, tmp_path):
    monkeypatch.setenv(runfiles.FOLDER_VARIABLE, str(tmp_path / "runs"))
    monkeypatch.syspath_prepend(str(ROOT))
    yield
    for record in runfiles.every():
        if record.lives:
            subprocess.run([*CLI, "stop", record.name], cwd=ROOT, check=True, timeout=120)


def test_four_services_share_a_gpu_with_a_notebook(pool, end_programs):  # noqa: F811
    asyncio.run(share(pool(MACHINE, quiet_after=0.3)))


async def share(found):
    services = [Service(found, number) for number in range(1, 5)]
    try:
        await asyncio.gather(*(one.connect() for one in services))
        notebook = await found.kernel(
            "notebook", memory=FIFTH * MiB, provisioner={"limit": FIFTH * MiB}
        )
        (await notebook.run(cells.setup(9, 96))).check()
        flag = found.folder / "enough"
        cell = asyncio.ensure_future(notebook.run(cells.COMPUTING.format(flag=str(flag))))
        await asyncio.gather(*(one.serve() for one in services))
        # All five run at the same time on the one GPU, each within its own fifth.
        await until(
            lambda: [s["granted_bytes"] for s in found.sessions()] == [FIFTH * MiB] * 5,
            "all of them to have their fifth", show=found.sessions,
        )  # fmt: skip
        status = found.check_ledger()
        labels = {s["label"]: s["compute"] for s in status["sessions"]}
        assert labels == {**{one.name: 20 for one in services}, "notebook": 100}
        assert not any(s["suspends"] for s in status["sessions"]), "nobody had to yield"
        for one in services:
            assert await one.ask(alloc=FIFTH - MODEL) == "CUDA_ERROR_OUT_OF_MEMORY"
            assert await one.ask(alloc=8) == "CUDA_SUCCESS"
        await asyncio.gather(*(one.serve() for one in services))
        flag.touch()
        (await cell).check()
        (await notebook.run("block.verify()")).check()
        await notebook.stop()
        # Stop one service after another, as systemd does. The remaining services must still answer.
        for place, one in enumerate(services):
            done = subprocess.run(
                [*CLI, "stop", one.name], cwd=ROOT, capture_output=True, text=True, timeout=120,
                check=False,
            )  # fmt: skip
            assert "by SIGTERM" in done.stdout, done
            await asyncio.gather(*(left.ask(ns=1, word=0) for left in services[place + 1 :]))
    finally:
        for one in services:
            one.close()


def test_unit_calls_the_command_correctly():
    """The unit starts ``jupyter gpupool run`` with valid options and the command of the service."""
    text = UNIT.read_text()
    line = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)[1]
    found = re.search(r'^# +GPU="(.*)"\n# +COMMAND="(.*)"$', text, re.MULTILINE)
    words = (
        line.replace("%i", "ocr").replace("$GPU", found[1]).replace("$COMMAND", found[2]).split()
    )
    assert Path(words[0]).name == "jupyter-gpupool"
    options = commands._build()[0].parse_args(words[1:])
    assert (options.command, options.name, options.memory) == ("run", "ocr", "4GiB")
    assert (options.limit, options.compute, options.attach) == ("4GiB", 20, "hold")
    assert options.words == ["--", "/srv/ocr/bin/serve", "--port", "8101"]
