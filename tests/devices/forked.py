# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Forks the device children and CUDA processes instead of executing them.

See ``tests/broker/forks.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

from jupyter_gpupool.devices import child
from tests.broker import forks

#: The function of asyncio that :func:`create_subprocess_exec` replaces.
_execute = asyncio.create_subprocess_exec


async def create_subprocess_exec(*command, **options):
    """Fork a command that ``forks`` can run; execute any other command."""
    env = options.get("env") or os.environ
    piped = options.get("stdin") == options.get("stdout") == asyncio.subprocess.PIPE
    if not (piped and options.get("start_new_session") and forks.can_run(command, env)):
        return await _execute(*command, **options)
    command = [*command]
    if command[1] == str(child.SCRIPT):
        # This argument names the parent of the child. If the child has another parent, it ends. The
        # service has named itself, but is not the parent of a forked child. So name the parent.
        assert command[4] == str(os.getpid()), command
        command[4] = str(forks.parent())
    stdin, write = os.pipe()
    read, stdout = os.pipe()
    folder = options.get("cwd") or os.getcwd()  # noqa: PTH109
    try:
        process = forks.run(command, env=env, standard=[stdin, stdout, 2], folder=folder)
    finally:
        os.close(stdin)
        os.close(stdout)
    return await Forked(process).connect(write, read, options.get("limit", 1 << 16))


class Forked:
    """A forked process.

    The class has the part of :class:`asyncio.subprocess.Process` that the service uses.
    """

    def __init__(self, process):
        self.pid = process.pid
        self._process = process
        self._ended = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(process.status, self._end)

    async def connect(self, write, read, limit):
        """Open this process's ends of the pipes."""
        loop = asyncio.get_running_loop()
        self.stdout = asyncio.StreamReader(limit)
        self._transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self.stdout), os.fdopen(read, "rb", 0)
        )
        transport, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(write, "wb", 0)
        )
        self.stdin = asyncio.StreamWriter(transport, protocol, None, loop)
        return self

    @property
    def returncode(self):
        return self._process.returncode

    def kill(self):
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process.handle, signal.SIGKILL)

    async def wait(self):
        try:
            await asyncio.shield(self._ended)
        finally:
            self.stdin.close()
            self._transport.close()
        await asyncio.sleep(0)  # time for the transports to close
        return self.returncode

    def _end(self):
        asyncio.get_running_loop().remove_reader(self._process.status)
        self._process.wait()
        if not self._ended.done():
            self._ended.set_result(None)
