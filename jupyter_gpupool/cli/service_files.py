# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Makes the files of the machine's service, for each service manager. Pure.

The first comment of each file ends with a checksum of the rest of the file. The checksum shows
whether an admin has changed the file.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Callable, Sequence

MARK = "Written by `jupyter gpupool install-service`; checksum"

#: The capabilities that the broker keeps as root. With ``CAP_SYS_PTRACE`` it reads data of all
#: users' processes, and suspends the processes. With ``CAP_KILL`` it ends processes, if the option
#: ``overuse`` or an admin requires this. With ``CAP_CHOWN``, ``CAP_FOWNER`` and
#: ``CAP_DAC_OVERRIDE`` it creates each session's page for the session's user.
CAPABILITIES = ("CAP_SYS_PTRACE", "CAP_KILL", "CAP_CHOWN", "CAP_FOWNER", "CAP_DAC_OVERRIDE")


@dataclass(frozen=True)
class ServiceFile:
    """A file of the service: its place, its content, and whether it is a program."""

    path: Path
    text: str
    program: bool = False


@dataclass(frozen=True)
class Layout:
    """The facts about this machine that go into the files.

    Attributes
    ----------
    python:
        The interpreter that has jupyter_gpupool.
    config:
        Further configuration files.
    socket:
        The path where the broker listens; the service makes and owns its folder.
    state:
        The folder for the journal.
    loader:
        The program that loads NVIDIA's kernel module and makes its device files; None if the
        machine does not have this program. The broker itself is not allowed to do this work.
    hosts_kernels:
        Whether the broker starts kernels for servers on other machines. These kernels are the
        broker's child processes, so the limits of its unit would also apply to them.
    """

    python: Path
    config: tuple[Path, ...]
    socket: Path
    state: Path
    loader: Path | None = None
    hosts_kernels: bool = False

    @property
    def command(self) -> list[str]:
        """The command that runs the broker in the foreground."""
        options = [word for path in self.config for word in ("--config", str(path))]
        broker = ["-m", "jupyter_gpupool.broker", "--socket", str(self.socket)]
        return [str(self.python), *broker, *options]


@dataclass(frozen=True)
class Manager:
    """A service manager: its files, and the commands that start and end the service.

    After the files are written, the commands ``upgrade`` run if an earlier installation was
    complete (see ``sign``), else the commands ``begin``. The commands ``end`` run before the files
    are removed. Each command may run a second time, because an earlier installation may have
    stopped halfway.
    """

    files: Callable[[Layout], list[ServiceFile]]
    begin: Callable[[Layout], list[list[str]]]
    upgrade: Callable[[Layout], list[list[str]]]
    end: Callable[[Layout], list[list[str]]]
    #: Takes the text of the service file that runs the broker. Returns the words of the broker's
    #: command, which it finds in this text.
    command_in: Callable[[str], list[str]]
    #: Commands that run after the files are removed.
    ended: Sequence[Sequence[str]] = ()
    #: A file that the commands ``begin`` make; None if they make no file. If this file is missing,
    #: the installation is not complete.
    sign: Path | None = None


def earlier_config(manager: Manager, text: str) -> tuple[Path, ...]:
    """Return the configuration files in the broker's command; ``text`` is the service file."""
    words = manager.command_in(text)
    return tuple(Path(after) for word, after in pairwise(words) if word == "--config")


def _line_after(start: str, text: str) -> str:
    """Return the rest of the last line that begins with ``start``; "" if no line does."""
    found = [line for line in text.splitlines() if line.startswith(start)]
    return found[-1].removeprefix(start) if found else ""


def stamped(text: str) -> str:
    """Return ``text`` with its checksum in a comment: the first line, or the line after ``#!``."""
    first, _, rest = text.partition("\n")
    line = f"# {MARK} {_sum(text)}\n"
    return f"{first}\n{line}{rest}" if first.startswith("#!") else line + text


def is_unchanged(text: str) -> bool:
    """Return whether this package's command wrote this text, and nobody has changed it since."""
    found = re.search(rf"^\S+ {re.escape(MARK)} ([0-9a-f]+)\n", text, re.MULTILINE)
    return found is not None and found[1] == _sum(text.replace(found[0], "", 1))


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ---------------------------------------------------------------------- systemd

_SOCKET_UNIT = """\
# systemd keeps the socket: a client that connects during a restart waits for the next broker.
[Unit]
Description=Socket of the GPU pool for Jupyter kernels

[Socket]
ListenStream={socket}
SocketMode=0666
DirectoryMode=0755
Backlog=512
# The file of the socket stays while the broker is stopped.
RemoveOnStop=no

[Install]
WantedBy=sockets.target
"""

_SERVICE_UNIT = """\
# Your own settings belong in a drop-in: systemctl edit gpupool
[Unit]
Description=GPU pool for Jupyter kernels
Requires=gpupool.socket
After=gpupool.socket nvidia-persistenced.service
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
{loader}ExecStart={command}
ExecReload=kill -HUP $MAINPID
Restart=always
RestartSec=1
TimeoutStartSec=180
TimeoutStopSec=30
# If the broker's event loop hangs, systemd restarts the broker. Kernels keep their state.
WatchdogSec=60
{kill}OOMScoreAdjust=-500
LimitNOFILE=65536

# This folder contains the pages of sessions, which kernels use after the broker's end.
RuntimeDirectory={runtime}
RuntimeDirectoryMode=0755
RuntimeDirectoryPreserve=yes
{state}{limits}
[Install]
WantedBy=multi-user.target
"""

_KILL_ALL = """\
# Kernels of this machine's servers are not children of the broker, so they go on without it.
KillMode=mixed
"""

_LIMITS = """\

# The broker is root with only the rights that it needs. It sees all processes, /dev and /tmp,
# because the driver's calls need them. Do not set ProtectClock, which would close /dev/nvidia*.
CapabilityBoundingSet={capabilities}
NoNewPrivileges=yes
ProtectSystem=strict
# Self-tests and the driver write files there.
ReadWritePaths=-/tmp -/var/tmp
ProtectHome=read-only
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=~@clock @cpu-emulation @module @mount @obsolete @raw-io @reboot @swap
SystemCallErrorNumber=EPERM
LimitCORE=0
"""

#: The unit has these lines only if the option ``cluster_identity`` is set.
_KILL_BROKER = """\
# Kernels of servers on other machines are children of the broker, but must go on without it.
KillMode=process
"""

_NO_LIMITS = """\

# Kernels of servers on other machines also get the limits of this unit, so it has no others.
TasksMax=infinity
"""

_TMPFILES = """\
# Make the folder of the socket before the service starts. Never remove the files of users' own
# brokers by their age: running kernels use them.
d {runtime} 0755 root root -
d {state} 0700 root root -
x /dev/shm/gpupool-*
x /var/tmp/gpupool-*
"""


def _words_of_unit(text: str) -> list[str]:
    words = shlex.split(_line_after("ExecStart=", text))
    return [word.replace("$$", "$").replace("%%", "%") for word in words]


def _unit_words(words: Sequence[str]) -> str:
    """Return words as text for a unit: quoted, and with special characters escaped.

    systemd expands variables in each word of a command after the first word. So the text has ``$$``
    for a ``$`` in these later words.
    """
    quoted = []
    for number, word in enumerate(words):
        plain = word.replace("%", "%%").replace("$", "$$" if number else "$")
        if set(plain) & set(" \t'\"\\"):
            plain = '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
        quoted.append(plain)
    return " ".join(quoted)


def _systemd_files(layout: Layout) -> list[ServiceFile]:
    units = Path("/etc/systemd/system")
    runtime, state = layout.socket.parent, layout.state
    known = Path("/var/lib") in state.parents
    folder = (
        f"StateDirectory={_unit_words([str(state.relative_to('/var/lib'))])}\n"
        "StateDirectoryMode=0700\n"
        if known
        else f"ReadWritePaths={_unit_words([str(state)])}\n"
    )
    places = {"runtime": _unit_words([str(runtime)]), "state": _unit_words([str(state)])}
    loader = _unit_words([str(layout.loader), "-u", "-c", "0"])
    service = _SERVICE_UNIT.format(
        loader=f"ExecStartPre=-+{loader}\n" if layout.loader else "",
        command=_unit_words(layout.command),
        runtime=runtime.relative_to("/run"),
        state=folder,
        kill=_KILL_BROKER if layout.hosts_kernels else _KILL_ALL,
        limits=_NO_LIMITS
        if layout.hosts_kernels
        else _LIMITS.format(capabilities=" ".join(CAPABILITIES)),
    )
    return [
        ServiceFile(Path("/etc/tmpfiles.d/gpupool.conf"), _TMPFILES.format(**places)),
        ServiceFile(units / "gpupool.socket", _SOCKET_UNIT.format(socket=layout.socket)),
        ServiceFile(units / "gpupool.service", service),
    ]


_RELOAD = ["systemctl", "daemon-reload"]
_UNITS = ["gpupool.socket", "gpupool.service"]
_TMPFILES_COMMAND = ["systemd-tmpfiles", "--create", "/etc/tmpfiles.d/gpupool.conf"]

SYSTEMD = Manager(
    files=_systemd_files,
    begin=lambda _: [_TMPFILES_COMMAND, _RELOAD, ["systemctl", "enable", "--now", *_UNITS]],
    upgrade=lambda _: [
        *(_TMPFILES_COMMAND, _RELOAD, ["systemctl", "enable", "--now", "gpupool.socket"]),
        ["systemctl", "enable", "gpupool.service"],
        ["systemctl", "restart", "gpupool.service"],
    ],
    end=lambda _: [["systemctl", "disable", "--now", *reversed(_UNITS)]],
    command_in=_words_of_unit,
    ended=[_RELOAD],
)

# ---------------------------------------------------------------------- OpenRC

_OPENRC = """\
#!/sbin/openrc-run
# Your own settings belong in /etc/conf.d/gpupool.
name="GPU pool for Jupyter kernels"
supervisor=supervise-daemon
command={python}
command_args={arguments}
output_log=/var/log/gpupool.log
error_log=/var/log/gpupool.log
respawn_delay=1
respawn_max=0
extra_started_commands="reload"

depend() {{
    after nvidia-persistenced
}}

start_pre() {{
    checkpath --directory --mode 0755 {runtime}
    checkpath --directory --mode 0700 {state}
}}

reload() {{
    ebegin "Reading the configuration again"
    supervise-daemon "$RC_SVCNAME" --signal HUP
    eend $?
}}
"""


def _words_of_openrc(text: str) -> list[str]:
    return [word for line in shlex.split(_line_after("command_args=", text)) for word in
            shlex.split(line)]  # fmt: skip


def _openrc_files(layout: Layout) -> list[ServiceFile]:
    python, *arguments = layout.command
    text = _OPENRC.format(
        python=shlex.quote(python), arguments=shlex.quote(shlex.join(arguments)),
        runtime=shlex.quote(str(layout.socket.parent)), state=shlex.quote(str(layout.state)),
    )  # fmt: skip
    return [ServiceFile(Path("/etc/init.d/gpupool"), text, program=True)]


OPENRC = Manager(
    files=_openrc_files,
    begin=lambda _: [
        ["rc-update", "add", "gpupool", "default"],
        ["rc-service", "gpupool", "start"],
    ],
    upgrade=lambda _: [
        ["rc-update", "add", "gpupool", "default"],
        ["rc-service", "gpupool", "restart"],
    ],
    end=lambda _: [
        ["rc-service", "gpupool", "stop"],
        ["rc-update", "delete", "gpupool", "default"],
    ],
    command_in=_words_of_openrc,
)

# ---------------------------------------------------------------------- runit

_RUNIT = """\
#!/bin/sh
exec 2>&1
mkdir -p -m 0755 {runtime}
mkdir -p -m 0700 {state}
exec {command}
"""

_RUNIT_LOG = """\
#!/bin/sh
mkdir -p -m 0755 /var/log/gpupool
exec svlogd -tt /var/log/gpupool
"""


def _runit_files(layout: Layout) -> list[ServiceFile]:
    text = _RUNIT.format(
        runtime=shlex.quote(str(layout.socket.parent)), state=shlex.quote(str(layout.state)),
        command=shlex.join(layout.command),
    )  # fmt: skip
    folder = Path("/etc/sv/gpupool")
    return [
        ServiceFile(folder / "log" / "run", _RUNIT_LOG, program=True),
        ServiceFile(folder / "run", text, program=True),
    ]


_RUNIT_LINK = Path("/etc/service/gpupool")

RUNIT = Manager(
    files=_runit_files,
    begin=lambda _: [["ln", "-sfn", "/etc/sv/gpupool", str(_RUNIT_LINK)]],
    upgrade=lambda _: [["sv", "restart", "gpupool"]],
    # "sv stop" waits for the broker's end; "sv down" does not.
    end=lambda _: [["sv", "-w", "30", "stop", "gpupool"], ["rm", "-f", str(_RUNIT_LINK)]],
    command_in=lambda text: shlex.split(_line_after("exec ", text)),
    sign=_RUNIT_LINK,
)

#: The service managers by their name in ``--manager``.
MANAGERS = {"systemd": SYSTEMD, "openrc": OPENRC, "runit": RUNIT}
