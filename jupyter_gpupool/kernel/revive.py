# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Restarts a broker that has died, and describes the restart to the user of a waiting cell.

The agent cannot start the broker directly: a kernel may run in a different Python than the broker,
and it must not become the broker's parent process. So the agent runs the provisioner's shell
command, which the guard also runs (:func:`jupyter_gpupool.startrecord.launcher`). The command
returns at once.
"""

from __future__ import annotations

import logging
import subprocess
import time
from pathlib import Path
from typing import Mapping

from ..endpoint import START_TIMEOUT, is_machine_path
from ..errors import BrokerUnavailable, Code, GPUPoolError

#: Seconds to wait for a broker that this kernel cannot start itself.
GRACE = 5.0

#: Seconds between two attempts of this kernel to start the broker.
AGAIN = 2.0

#: The most seconds that the shell command may take. The command starts the broker, but does not
#: wait until the broker accepts connections.
SHELL = 10.0

log = logging.getLogger("jupyter_gpupool.kernel")


class Reviver:
    """Restarts the broker at ``path``.

    The link's connecting thread calls :meth:`away` and :meth:`came_back`.
    """

    def __init__(self, path: Path, environ: Mapping[str, str]) -> None:
        self._path = path
        self._environ = dict(environ)
        self._service = is_machine_path(path)
        self._next = 0.0
        #: Whether some process is starting the broker, or will start it soon.
        self.expected = self._service
        #: A cell stops waiting for the broker after this many seconds without a broker. After a
        #: failed attempt to connect, :meth:`away` may set another time. But the machine's socket
        #: may accept connections while no broker runs. Then no attempt to connect fails, so for
        #: that socket the time is long from the start.
        self.patience = START_TIMEOUT if self._service else GRACE

    def away(self, error: GPUPoolError) -> GPUPoolError:
        """Try to restart a broker that does not listen; return the error to show the user."""
        # Imported here, because the imports would slow down each kernel's start, and few kernels
        # lose their broker.
        from .. import startrecord as record

        # Other threads read ``expected`` and ``patience`` at any time. So each branch sets them
        # only once, and to the final values.
        if self._service:
            return error
        if record.being_started(self._path):
            self.expected, self.patience = True, START_TIMEOUT
            return error
        command = self._environ.get(record.REVIVE_VARIABLE, "")
        copy = self._environ.get(record.COPY_VARIABLE, "")
        can = record.can_revive(self._path) or record.can_restore(self._path, copy)
        if not command or not can:
            self.expected, self.patience = False, GRACE
            return error
        failed = self.failed_start()
        if failed is not None:
            self.expected, self.patience = False, 0.0
            return failed
        self.expected, self.patience = True, START_TIMEOUT
        self._start(command)
        return error

    def failed_start(self) -> GPUPoolError | None:
        """Return the error to show if the broker's starts have failed; otherwise None.

        Any thread may call this method.
        """
        from ..startfailures import read_failures

        if self._service:
            return None
        known = read_failures(self._path)
        if not (known.given_up and known.pause(time.time())):
            return None
        return BrokerUnavailable(known.sentence, code=Code.START_FAILED, next_step=known.next_step)

    def came_back(self) -> None:
        """Record that a broker answers again, and reset the state of the last restart."""
        if not self._service:
            self.expected, self.patience = False, GRACE

    def describe(self) -> str:
        """Return one line for a cell that waits for the broker."""
        if self.expected and self._service:
            return (
                f"The machine's GPU pool broker at {self._path} does not answer; the cell waits "
                "until the service manager has started it again."
            )
        if self.expected:
            from ..startfailures import read_failures
            from ..startrecord import log_path

            text = "The GPU pool's broker ended; it is being started again"
            often = read_failures(self._path).often(time.time())
            return f"{text} ({often}; its log: {log_path(self._path)})." if often else f"{text}."
        return f"Waiting for the GPU pool broker at {self._path}."

    # ------------------------------------------------------------------ internals

    def _start(self, command: str) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + AGAIN
        try:
            subprocess.run(
                ["/bin/sh", "-c", command],
                env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                timeout=SHELL,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("The GPU pool's broker cannot be started from here: %s", error)
