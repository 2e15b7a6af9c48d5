# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Decides whether new kernels run under the guard, and gives them the variables for it."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Mapping

from ...config.settings import usable_attach
from ...containers.content import Content
from ...errors import Code, GPUPoolError, RefusedError
from ...guard.install import guard_directory
from ...guard.page import PASSED
from ...states import AttachPolicy
from ..configuration import Configuration
from ..sessions import LiveSession
from .control import ControlPages, environment


class GuardSetup:
    """Makes the pages of new kernels, and keeps the links to the guard's library.

    Parameters
    ----------
    links:
        The folder for the links, which is made if necessary.
    guarded:
        Whether a device's self-test says that the guard works.
    problem:
        Why the guard does not work, or why there is no folder for pages; "" if there is no problem.
    content:
        What this machine gives to containers; None if the broker serves no containers.
    """

    def __init__(
        self,
        pages: ControlPages,
        configuration: Configuration,
        links: Path,
        *,
        guarded: bool,
        problem: str,
        log: logging.Logger,
        content: Content | None = None,
    ) -> None:
        self._pages = pages
        self._configuration = configuration
        self._links = links
        self._content = content
        self._log = log
        self._directory = Path()
        #: Why kernels cannot have a page although their devices are guarded; "" if they can.
        self._unguardable = problem if guarded else ""
        if guarded and not problem:
            try:
                self._link()
            except (OSError, GPUPoolError) as error:
                problem = self._unguardable = str(error)
        #: ``guarded``: whether new kernels can run under the guard. ``problem``: if they cannot,
        #: why.
        self.guarded = guarded and not problem
        self.problem = problem
        if self.attach[1]:
            log.warning("%s", self.attach[1])

    @property
    def attach(self) -> tuple[AttachPolicy, str]:
        """The attach policy of a session that names no policy, and a reason.

        If the configured policy cannot be used, the reason says why; otherwise it is "".
        """
        configured = self._configuration.settings.attach
        return usable_attach(configured, self.guarded, self.problem)

    def environment(
        self, session: LiveSession, base: Mapping[str, str], limit: int
    ) -> dict[str, str]:
        """Make the page of a new session; return the variables to add to ``base`` for the guard.

        The result is {} if the session runs without the guard.

        Raises
        ------
        RefusedError
            If the session must run without the guard, and the configuration does not allow that.
        """
        home, problem = ",".join(session.home), self._unguardable
        if self.guarded:
            try:
                page = self._pages.create(session, session.home, limit)
                if self._content is not None and isinstance(session.uid, str):
                    return environment(self._content.guard, Path(PASSED), base, home)
                return environment(self._directory, page, base, home)
            except OSError as error:
                problem = (
                    f"The page that the kernel shares with the broker cannot be made: {error}."
                )
        if not problem:
            return {}
        if not self._configuration.settings.allow_unguarded:
            raise RefusedError(
                f"The kernel was not started, because it would run without the guard. {problem}",
                code=Code.NO_PAGE,
                next_step="Free memory where the pages are (`df -h /dev/shm /run`), or set "
                "c.GPUPool.allow_unguarded = True.",
            )
        self._log.error("Session %s runs without the guard. %s", session.id, problem)
        return {}

    def without(self, session: LiveSession) -> dict[str, str]:
        """Let a session run without the guard, which its program can no longer load; return {}.

        Raises
        ------
        RefusedError
            If the configuration does not allow that.
        """
        if self.guarded and not self._configuration.settings.allow_unguarded:
            raise RefusedError(
                "This program has already loaded the CUDA driver, so the guard cannot limit the "
                "program to its slice. This pool requires the guard (c.GPUPool.allow_unguarded).",
                code=Code.NO_GUARD,
                next_step="Ask for the slice before the program loads CUDA, or start the program "
                "with: jupyter gpupool run -- COMMAND.",
            )
        if self.guarded:
            self._log.info(
                "Session %s runs without the guard: its program had already loaded the CUDA driver",
                session.id,
            )
        return {}

    async def keep(self) -> None:
        """Restore the deleted files of living sessions.

        Raises
        ------
        OSError, GPUPoolError
            If that is not possible now.
        """
        await self._pages.keep()
        if self.guarded:
            self._link()

    def close(self) -> None:
        """Close the pages. If no session has a page, remove the pages' folder and the links."""
        if self._pages.close():
            shutil.rmtree(self._links, ignore_errors=True)

    def _link(self) -> None:
        """Make the folder of links to the guard, or restore its missing files."""
        self._links.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = guard_directory(self._links)
