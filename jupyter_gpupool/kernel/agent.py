# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The agent of one kernel: it creates its parts, installs them, and removes them again."""

from __future__ import annotations

import os
import sys
from typing import Any, Callable

from ..endpoint import NO_SESSION_VARIABLE, SOCKET_VARIABLE
from .cells import CellGate
from .frameworks import CudaProbe, FrameworkCaps, Visible
from .guard_state import Guard
from .link import SessionLink
from .magic import GPUMagics, complete_gpu
from .waits import Interrupts

SESSION_VARIABLE = "GPUPOOL_SESSION"
TOKEN_VARIABLE = "GPUPOOL_TOKEN"
ATTACH_VARIABLE = "GPUPOOL_ATTACH"
NOTICE_VARIABLE = "GPUPOOL_NOTICE"

_COMPLETED = ("%gpu", "%%gpu")


class Agent:
    """Creates, installs and removes the parts of this package in one IPython kernel.

    A kernel without a session gets only ``%gpu``, which reports that there is no session. If a
    launcher has tried to open a session and failed, the first cell says why the kernel has no GPU.
    """

    def __init__(self, shell: Any) -> None:
        self.shell = shell
        self.link: SessionLink | None = None
        self.gate: CellGate | None = None
        self.visible: Visible | None = None
        environ = os.environ
        # Remove this variable, because programs that this kernel starts must not read it.
        self._no_session = environ.pop(NO_SESSION_VARIABLE, "")
        if environ.get(SESSION_VARIABLE) and getattr(shell, "kernel", None) is not None:
            guard = Guard(environ)
            probe = CudaProbe()
            self.link = SessionLink(
                environ.get(SOCKET_VARIABLE, ""),
                environ[SESSION_VARIABLE],
                environ.get(TOKEN_VARIABLE, ""),
                attach=environ.get(ATTACH_VARIABLE, "cell"),
                cuda=guard.cuda if guard.on else probe,
                cuda_blocks=not guard.on,
                on_lost=self._show,
                on_notice=self._show,
                on_news=self._news,
                environ=environ,
            )
            interrupts = Interrupts(self._on_main_loop)
            self.gate = CellGate(shell, self.link, guard, FrameworkCaps(probe), interrupts)
            if guard.on:
                self.visible = Visible(guard.devices)
            # Remove this variable, because a server that the user starts from this kernel must not
            # read it.
            notice = os.environ.pop(NOTICE_VARIABLE, "")
            if notice:
                self.gate.notice(f"GPU pool: {notice}")
        self.magics = GPUMagics(shell, self.link, self.gate, self._no_session)

    def load(self) -> None:
        """Install all parts."""
        self.shell.register_magics(self.magics)
        for name in _COMPLETED:
            self.shell.set_hook("complete_command", self._complete, str_key=name)
        if self.gate is not None and self.link is not None:
            self.gate.install()
            if self.visible is not None:
                self.visible.install()
            self.link.start()
        elif self._no_session:
            self.shell.events.register("pre_run_cell", self._say_no_session)

    def unload(self) -> None:
        """Undo :meth:`load`. The broker frees the slice later, when the kernel ends."""
        if self.gate is not None and self.link is not None:
            self.gate.uninstall()
            if self.visible is not None:
                self.visible.uninstall()
            self.link.close()
            self.gate.guard.close()
        for kind in ("line", "cell"):
            self.shell.magics_manager.magics[kind].pop("gpu", None)
        # IPython has no function that removes a hook. It stores each hook as a method of the shell.
        for name in _COMPLETED:
            chain = self.shell.strdispatchers["complete_command"].strs[name].chain
            chain[:] = [entry for entry in chain if entry[1].__func__ != self._complete]

    def _say_no_session(self, *_: object) -> None:
        """Print why this kernel has no GPU, under its first cell; called by IPython."""
        self.shell.events.unregister("pre_run_cell", self._say_no_session)
        print(f"GPU pool: this kernel runs without a GPU: {self._no_session}", file=sys.stderr)

    def _complete(self, shell: Any, event: Any) -> list[str]:
        return complete_gpu(shell, event, self.link.limits if self.link is not None else None)

    def _on_main_loop(self, run: Callable[[], None]) -> None:
        # Get the loop only now, because the kernel has no loop while IPython loads extensions.
        self.shell.kernel.io_loop.add_callback(run)

    def _news(self) -> None:
        if self.gate is not None:
            self.gate.news()

    def _show(self, message: str) -> None:
        """Show ``message`` at once under the latest cell, and again above the next output."""
        text = f"GPU pool: {message}"
        if self.gate is not None:
            self.gate.notice(text)
            self.gate.announce(text)
