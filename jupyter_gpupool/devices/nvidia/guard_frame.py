# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The self-test under the guard.

The test program gets all that a session gets from the broker: a page, the links to the guard, and
answers to the guard's requests. The test has all steps of the self-test without the guard. It also
checks three facts about the guard:

- The guard lets calls through while the gate is open.
- It refuses an allocation beyond the grant, with the same error as the driver.
- It holds a call at the closed gate, even during a suspend and resume.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import AsyncIterator, Callable, Iterator, Mapping

from ... import procfs
from ...errors import Code, GPUPoolError
from ...guard import install, page
from ...guard.page import Page, Reading
from ..children import Child
from . import selftest
from .child_programs import SIZE

#: ``GRANT``: bytes of the test's slice. The context does not count. ``TOO_MUCH``: bytes of an
#: allocation that exceeds the slice.
GRANT = 64 << 20
TOO_MUCH = GRANT + (1 << 20)

#: The test waits at most this many seconds for a call to reach the closed gate, and then again for
#: earlier calls to return from the driver.
GATE_TIMEOUT = 10.0

#: Seconds between two reads of the page. The page sends no event when it changes.
_POLL = 0.005

#: The name of a test's folder begins with this prefix. The pid of the test's broker follows.
_PREFIX = "gpupool-selftest-"

#: A folder whose files are only in memory. The guard also works in other folders.
_SHM = Path("/dev/shm")


class GuardFrame(selftest.Frame):
    """One test program's session. :func:`guard_frame` makes it."""

    def __init__(self, folder: Path, uuid: str, index: int, base: Mapping[str, str]) -> None:
        # The name is unique: several tests run at once, and each must find only its own process.
        self.session = f"{selftest.SESSION}-{secrets.token_hex(8)}"
        self.page = Page.create(folder / "page", self.session, os.geteuid())
        self._index = index
        self._socket = folder / "s"
        self._token = secrets.token_hex(16)
        self._opened = asyncio.Event()
        self._held: asyncio.Task[bool] | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self.page.set_policy(managed=False, context_bytes=0)
        self._open(uuid)
        self.env = {
            **base,
            **install.session_environment(install.guard_directory(folder), self.page.path, base),
            "CUDA_VISIBLE_DEVICES": uuid,
            "GPUPOOL_VISIBLE": uuid,
            "GPUPOOL_SOCKET": str(self._socket),
            "GPUPOOL_SESSION": self.session,
            "GPUPOOL_TOKEN": self._token,
        }

    def failed(self, problem: str) -> str:
        """Return the sentence for a failure."""
        return f"The guard did not pass its self-test on GPU {self._index}: {problem}"

    async def begun(self, target: Child) -> str:
        """Return "" if the guard counts the program's memory and limits it to the grant.

        Otherwise return the problem.
        """
        before = self.page.read()
        if before.gate != page.OPEN or not any(slot.pid == target.pid for slot in before.slots):
            return "the test program's calls did not go through the guard"
        if sum(before.used) < SIZE:
            return f"the guard counted only {sum(before.used)} of {SIZE} bytes"
        answer = await target.call("over", selftest.STEP_TIMEOUT, size=TOO_MUCH)
        if answer["result"] != "CUDA_ERROR_OUT_OF_MEMORY":
            return f"an allocation beyond the grant returned {answer['result']}"
        left = sum(self.page.read().used) - sum(before.used)
        return f"a refused allocation changed the guard's count by {left} bytes" if left else ""

    async def hold(self, target: Child) -> str:
        """Close the gate, then start a call. Return "" if the gate holds it, else the problem."""
        self._opened.clear()
        self.page.set_gate(page.CLOSED)
        self._held = asyncio.create_task(super().check(target, ""))
        if not await self._until(lambda now: now.waiting > 0 or self._returned()):
            return "the test program did not reach the closed gate"
        if self._returned():
            return "a call went through the closed gate"
        if not await self._until(lambda now: now.inflight == 0):
            return "earlier calls did not return from the driver"
        return ""

    async def check(self, target: Child, device: str) -> bool:
        """Give the program a slice on ``device``, open the gate, and await the held call.

        Return whether the held call has read the right bytes.
        """
        if self._held is None:
            return await super().check(target, device)
        held, self._held = self._held, None
        if held.done():
            # The call has read the bytes while the program's state was not on the device. This is
            # an error even if the bytes are right.
            raise GPUPoolError(self.failed("a call went through the closed gate"))
        self._open(device)
        return await held

    async def close(self) -> None:
        """Release everything, after the program has ended."""
        self._opened.set()
        if self._held is not None:
            self._held.cancel()
        tasks = [*self._answering, *([self._held] if self._held else [])]
        await asyncio.gather(*tasks, return_exceptions=True)
        self.page.remove()

    # ------------------------------------------------------------------ internals

    def _open(self, uuid: str) -> None:
        self.page.set_devices([uuid])
        self.page.set_grant([GRANT], GRANT, 1)
        self.page.set_gate(page.UNUSED)
        self._opened.set()

    def _returned(self) -> bool:
        return self._held is not None and self._held.done()

    async def _until(self, condition: Callable[[Reading], bool]) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + GATE_TIMEOUT
        while not condition(self.page.read()):
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(_POLL)
        return True

    async def _serve(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self._connected, str(self._socket))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request of the guard, as the broker would."""
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            request = json.loads(await reader.readline() or "{}")
            answer = {"v": 1, "type": "ok", "id": request.get("id"), "epoch": 1}
            if request.get("token") != self._token or request.get("type") != "attach":
                answer |= {"type": "error", "code": Code.LIMIT, "message": "This is a self-test."}
            else:
                await self._opened.wait()
            writer.write(json.dumps(answer, separators=(",", ":")).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError):
            pass  # the test program has ended, or sent no request: the test will fail
        finally:
            self._answering.discard(task)
            writer.close()


@contextlib.asynccontextmanager
async def guard_frame(uuid: str, index: int, base: Mapping[str, str]) -> AsyncIterator[GuardFrame]:
    """Yield the frame for a test program on device ``uuid`` under the guard.

    ``base`` is the environment of children without the guard. Messages name the device by
    ``index``.

    Raises
    ------
    GPUPoolError
        If the guard is not compiled, or its folder cannot be made.
    OSError
        If no folder has room for the page.
    """
    install.library()
    folder = _folder()
    try:
        frame = GuardFrame(folder, uuid, index, base)
        server = await frame._serve()
        try:
            yield frame
        finally:
            server.close()
            await frame.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _folder() -> Path:
    """Return a new folder with room for a page.

    If one place has no room, this function tries the next place: a full file system is not a fault
    of the guard.

    Raises
    ------
    OSError
        If no folder has room.
    """
    problem: OSError | None = None
    for place in _places():
        try:
            _sweep(place)
            folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))
            try:
                with (folder / "room").open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, 2 * page.SIZE)
                (folder / "room").unlink()
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
        except OSError as error:
            problem = error
            continue
        return folder
    assert problem is not None
    raise problem


def _places() -> Iterator[Path]:
    yield _SHM
    # gettempdir() raises an error if no folder for temporary files is writable, for example under a
    # service manager that protects the file system. So call it only if the first place has failed.
    yield Path(tempfile.gettempdir())


def _sweep(place: Path) -> None:
    """Remove the folders that the tests of killed brokers left behind."""
    for folder in place.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            mine = folder.lstat().st_uid == os.geteuid()
            if mine and pid.isdigit() and not procfs.read_stat(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)
