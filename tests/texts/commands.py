# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The output of ``jupyter gpupool``, and its messages about a wrong configuration."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Iterator, Mapping
from unittest import mock

from jupyter_gpupool.cli import check_config as checking
from jupyter_gpupool.cli import checks, config_report
from jupyter_gpupool.cli import commands as cli
from jupyter_gpupool.cli.doctor import _lines, _summary
from jupyter_gpupool.cli.maintenance import progress
from jupyter_gpupool.cli.picture import Style, draw
from jupyter_gpupool.cli.program_commands import table
from jupyter_gpupool.config import BrokerSettings, load_settings, loading
from jupyter_gpupool.config.differences import notice
from jupyter_gpupool.config.grouping import read_portion
from jupyter_gpupool.errors import ConfigError, RefusedError
from jupyter_gpupool.kernel.holds import QueuePlace
from jupyter_gpupool.local_machine import boot_id
from jupyter_gpupool.pool.groups import Group
from jupyter_gpupool.programs.progress import too_long, waiting_for
from jupyter_gpupool.programs.runfiles import RunRecord
from jupyter_gpupool.units import parse_bytes, parse_seconds

from .sheet import Sheet

GiB, MiB = 1 << 30, 1 << 20


def commands(sheet: Sheet) -> None:
    """Write the help texts of the commands, and the messages about a wrong command line."""
    sheet.put(
        "jupyter gpupool --help begins and ends with",
        cli._description() + "\n" + cli.EXIT_CODES,
    )
    for name, parser in cli.subcommands().items():
        lines = [str(parser.description)]
        for action in parser._actions:
            if action.help and not isinstance(action, argparse._HelpAction):
                names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
                lines.append(f"  {names}: {action.help}")
        sheet.put(f"jupyter gpupool {name} --help", "\n".join(lines))
    for line in ("statsu", "drain", "status --interval 0"):
        sheet.put(f"jupyter gpupool {line}", _printed(line.split()))


def _printed(arguments: list[str]) -> str:
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(shown):
        cli.run(arguments)
    return shown.getvalue()


# --------------------------------------------------------------------------- status

UUIDS = ("GPU-5d1c0000-aaaa", "GPU-7e2f0000-bbbb")


def device(index: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "uuid": UUIDS[index], "index": index, "name": "NVIDIA H100", "emulated": False,
        "tier": "guarded", "tier_reason": "", "can_suspend": True, "memory_total": 16 * GiB,
        "memory_capacity": 16 * GiB, "memory_granted": 0, "memory_foreign": 0,
        "memory_free": 16 * GiB, "memory_used": 0, "utilisation": 0, "drained_reason": "",
        **changes,
    }  # fmt: skip


def session(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": name, "pid": 1, "owner": "ada", "label": f"{name}.ipynb", "kernel_id": name,
        "state": "detached", "attach": "lazy", "priority": "notebook", "granted_bytes": 0,
        "footprint_bytes": 0, "suspended_bytes": 0, "holds": [], "device": None, "devices": [],
        "request": {"memory": 4 * GiB, "limit": 4 * GiB, "devices": 1}, "queue_position": None,
        "queue_length": 0, "expected": None, "wait_reason": "", "pinned_reason": "",
        "wait_seconds_total": 0.0, "attached_seconds_total": 0.0, "idle_since": None,
        "suspends": 0, "resumes": 0, "migrations": 0, **changes,
    }  # fmt: skip


def on(index: int) -> dict[str, Any]:
    return {"device": UUIDS[index], "devices": [UUIDS[index]]}


STATUS: dict[str, Any] = {
    "version": "0.1.0", "socket": "/run/gpupool/broker.sock", "pid": 1, "now": 1000.0,
    "emulated": False, "machine": "", "queue_length": 1, "settings": {},
    "host": {"budget_bytes": 12 * GiB, "used_bytes": 5 * GiB, "available_bytes": 20 * GiB},
    "devices": [
        device(0, memory_granted=10 * GiB, memory_foreign=2 * GiB, memory_free=4 * GiB,
               utilisation=41),
        device(1, drained_reason="Xid 79", memory_free=None),
    ],
    "sessions": [
        session("77aa33", state="queued", queue_position=1,
                expected={"since": 1024.0, "until": 1058.0},
                wait_reason="all 16 GiB in use by running cells", wait_seconds_total=7,
                request={"memory": 8 * GiB, "devices": 2}),
        session("9c0d22", state="idle", granted_bytes=4 * GiB, idle_since=960.0,
                footprint_bytes=512 * MiB, pinned_reason="it uses managed memory", **on(0)),
        session("3f2a1b", state="active", granted_bytes=6 * GiB, footprint_bytes=GiB,
                used_bytes=3 * GiB, overuse_bytes=GiB, **on(0)),
        session("b00c44", suspended_bytes=5 * GiB),
    ],
}  # fmt: skip


def status(sheet: Sheet) -> None:
    """Write the output of ``status``, and the texts that say what ``pause`` waits for."""
    sheet.put("jupyter gpupool status", "\n".join(draw(STATUS, Style(width=90))))
    empty = {**STATUS, "devices": [], "sessions": [], "queue_length": 0}
    sheet.put("jupyter gpupool status, without a GPU", "\n".join(draw(empty, Style(width=90))))
    schedule = {"in_force": ["night"], "next_change": 1_795_590_000.0, "next": []}
    with mock.patch("time.localtime", time.gmtime):
        lines = draw({**empty, "schedule": schedule}, Style(width=90))
    sheet.put("jupyter gpupool status, with a schedule in force", lines[1])
    row = {"label": "viz.ipynb", "session": "9c0d22", "owner": "ada", "devices": ["0"],
           "why": "a cell runs"}  # fmt: skip
    order: dict[str, Any] = {"waits": [row], "others": 1, "device": "", "files": [], "step": ""}
    sheet.put("jupyter gpupool pause waits for kernels", "\n".join(progress(order)))
    files_open = {"pid": 4711, "session": "9c0d22", "command": "python", "uid": 1000}
    order = {**order, "waits": [], "others": 0, "files": [files_open]}
    sheet.put("jupyter gpupool pause waits for processes", "\n".join(progress(order)))


# --------------------------------------------------------------------------- doctor


def _defaults() -> BrokerSettings:
    """Return the default settings, with a fixed size of host memory in place of this machine's."""
    with tempfile.TemporaryDirectory() as folder, _only(folder):
        settings = load_settings()
    return replace(settings, pool=replace(settings.pool, host_memory=32 * GiB))


def _grouped(settings: BrokerSettings, guarantee: str) -> BrokerSettings:
    groups = {"lab": Group(guarantee=read_portion(guarantee))}
    return replace(settings, pool=replace(settings.pool, groups=groups))


@contextlib.contextmanager
def _only(folder: str) -> Iterator[None]:
    """Read only the configuration in ``folder``."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith("GPUPOOL")}
    with (
        mock.patch.object(loading, "jupyter_config_path", return_value=[folder]),
        mock.patch.dict(os.environ, plain, clear=True),
    ):
        yield


def programs(sheet: Sheet) -> None:
    """Write the texts about programs that wait, run detached, or have ended."""

    def link(**changes: Any) -> Any:
        fields = {"request": {}, "state": "queued", "queue": None, "path": "/run/b.sock",
                  "preempted": "", **changes}  # fmt: skip
        return SimpleNamespace(
            reviver=SimpleNamespace(expected=changes.get("expected", False)),
            unreachable_for=lambda: changes.get("away", 0.0), **fields,
        )  # fmt: skip

    now = time.monotonic()
    place = QueuePlace(2, 3, "all 16 GiB in use by running cells", now, (now + 24, now + 58))
    for situation, found in (
        ("A command of jupyter gpupool run waits", link(queue=place)),
        ("without an estimate", link(queue=QueuePlace(1, 1, "paused: new driver", now))),
        (
            "and has lost its slice in the middle of its work",
            link(queue=place, preempted="a kernel of a higher priority class needs the GPU"),
        ),
        ("and is on its way", link(state="attaching")),
        ("while the broker is away", link(away=3.0)),
        ("while it is started again", link(away=3.0, expected=True)),
    ):
        sheet.put(situation, waiting_for(found, 8 * GiB, 65.0, begun=False))
    late = too_long(link(queue=place), 600.0, "--max-wait")
    sheet.put("It waited longer than --max-wait", str(late), late.code)
    boot = boot_id()
    base = RunRecord("train", ("python", "train.py", "--epochs", "20"), "/home/ada", boot, (0, 0))
    records = [
        base,
        replace(base, name="ocr", state="running", started=940.0, session="3f2a1b",
                reason="its supervisor was killed, so its output is lost"),
        replace(base, name="night", state="running", started=940.0, session="3f2a1c"),
        replace(base, name="good", state="ended", ended=700.0, code=0),
        replace(base, name="killed", state="ended", ended=700.0, code=137),
        replace(base, name="late", state="ended", ended=700.0, code=125,
                reason="No GPU slice became free within 10 min (--max-wait)."),
        replace(base, name="old", state="running", boot="another").now(),
    ]  # fmt: skip
    preempted = {"preempted": "its time slice is over", "queue_position": 1, "queue_length": 2}
    sessions = {"3f2a1b": {"granted_bytes": 4 * GiB}, "3f2a1c": preempted}
    sheet.put("jupyter gpupool ps", "\n".join(table(records, sessions, 1000.0)))
    sheet.put("jupyter gpupool ps, of nothing", "\n".join(table([], {}, 0.0)))


#: A Monday evening in Berlin.
EVENING = 1795467600.0


def check_config(sheet: Sheet) -> None:
    """Write the reports of ``check-config`` on correct and wrong configuration files."""
    example = Path(__file__).parents[2] / "examples" / "day_and_night.py"
    gpus = checking.parse_devices("16x80GiB")
    in_force: dict[str, Any] = {
        "options": {"idle_timeout": 60.0, "guard": False}, "origins": {}, "hidden": ["admins"],
    }  # fmt: skip
    status: Mapping[str, Any] = {"pid": 4711, "socket": "/run/s", "config": in_force}
    with tempfile.TemporaryDirectory() as folder, _only(folder):
        path = Path(folder, "pool.py")
        path.write_text(example.read_text(encoding="utf-8"), encoding="utf-8")

        def put(situation: str, **changes: Any) -> None:
            fields: dict[str, Any] = {"alone": True, "now": EVENING, "socket": ""}
            report = checking.examine(path, changes.pop("given", gpus), **{**fields, **changes})
            text = "\n".join(config_report.lines(report, 90))
            sheet.put(situation, text.replace(folder, "/etc/jupyter"))

        with (
            mock.patch.object(checking, "_status", return_value=None),
            mock.patch.object(checking, "unknown_names", return_value=[]),
            mock.patch.object(checking, "doubly_in", return_value=[("ada", "lab", "thesis")]),
        ):
            put("jupyter gpupool check-config pool.py --alone --devices 16x80GiB")
            put("The same for a machine with one GPU", given=checking.parse_devices("1x80GiB"))
            path.write_text("c.GPUPool.groups = {'a': {}}\nc.GPUPool.idle_timeout = 90")
            put("A group without members", given=checking.Gpus([], "nowhere"))
            with mock.patch.object(checking, "_status", return_value=status):
                put("A broker runs with another configuration")
    for text in ("16", "2x80GiB,x"):
        sheet.put(f"--devices {text}", _refused(checking.parse_devices, text))
    sheet.put("--at tonight", _refused(checking.parse_time, "tonight"))


def _refused(read: Any, text: str) -> str:
    try:
        read(text)
    except RefusedError as error:
        return str(error)
    raise AssertionError(f"accepted: {text}")


def doctor(sheet: Sheet) -> None:
    """Write the output of those checks of ``doctor`` that do not depend on this machine."""
    settings = _defaults()
    order = {"kind": "pause", "device": "", "by": "root", "since": 0.0, "reason": "new driver"}
    mig = device(tier="mig", can_suspend=False, tier_reason="A MIG instance cannot be suspended.")
    with (
        mock.patch("time.localtime", time.gmtime),
        mock.patch.object(checks.Host, "total", return_value=64 * GiB),
    ):
        findings = [
            *checks.devices([device(context_bytes=512 * MiB), mig], ""),
            *checks.devices([device(1, drained_reason="Xid 79")], ""),
            *checks.devices([device(1, drained_reason="paused")], "", [order]),
            *checks.devices([], "The NVIDIA driver sees no GPU."),
            checks.attach("lazy", "", settings),
            checks.attach("cell", "Attach policy 'lazy' needs the guard.", settings),
            checks.attach("manual", "", settings),
            *checks.guard_limits([device()]),
            checks.socket(Path("/run/gpupool/broker.sock"), answers=True),
            checks.socket(Path("/nowhere/broker.sock"), answers=False),
            checks.host_memory(settings, [device(memory_capacity=1 << 40)]),
            *checks.default_fits(settings, [device(memory_capacity=2 * GiB)]),
            *checks.groups(_grouped(settings, "10%"), [device()]),
            *checks.groups(_grouped(settings, "3 devices"), [device()]),
        ]
    sheet.put(
        "jupyter gpupool doctor",
        "\n".join(line for f in findings for line in _lines(f, Style(width=90)))
        + "\n"
        + _summary(findings),
    )
    sheet.put("jupyter gpupool doctor ends with, if all is well", _summary(findings[:1]).strip())


# --------------------------------------------------------------------------- configuration

#: Lines of a configuration file. The product refuses each line.
WRONG = (
    "idle_timout = 60",
    "idle_timeout = 'soon'",
    "idle_timeout = -1",
    "default_memory = 'much'",
    "default_memory = 12.5",
    "default_memory = '12'",
    "attach = 'eager'",
    "guard = 'maybe'",
    "devices = []",
    "devices = ['H100']",
    "devices = [0, 0]",
    "quotas = {'@staff': {'leases': 1}}",
    "quotas = {'ada': 4}",
    "quotas = {'ada': {'gpus': 4}}",
    "quotas = {'ada': {'leases': -1}}",
    "quotas = {'ada': {'memory': 'much'}}",
    "priority_classes = {}",
    "priority_classes = {'a b': 1}",
    "priority_classes = {'high': 'first'}",
    "default_priority = 'urgent'",
    "host_memory = '120%'",
    "host_memory = 'half'",
    "host_reserve = '100%'",
    "max_swap_overhead = 2",
    "max_sessions_per_user = 0",
    "metrics_port = 70000",
    "socket = 'broker.sock'",
    f"socket = '/{'x' * 120}'",
    "default_limit = '1GiB'",
    "max_memory_per_kernel = '2GiB'",
    "emulate = '2x'",
    "linger = None",
    "preempt = ['clas']",
    "classes_allowed = ['bach']",
    "unsuspendable_after = ['1m']",
    "unsuspendable_after = ['1h', '1m', '1d']",
    "quotas = {'ada': {'gpu_seconds_per_day': {'seconds': '8h', 'then': 'kill'}}}",
    "groups = {'a b': {}}",
    "groups = {'lab': 5}",
    "groups = {'lab': {'guarentee': '40%'}}",
    "groups = {'lab': {'guarantee': 'much'}}",
    "groups = {'lab': {'guarantee': '140%'}}",
    "groups = {'lab': {'cap': '0 devices'}}",
    "groups = {'lab': {'guarantee': '50%', 'cap': '40%'}}",
    "groups = {'lab': {'weight': 0}}",
    "groups = {'lab': {'weight': 'two'}}",
    "groups = {'lab': {'users': 'ada'}}",
    "groups = {'lab': {'users': ['ada', '*']}}",
    "groups = {'lab': {'users': ['ada', 'ada']}}",
    "groups = {'lab': {'users': ['@staff']}}",
    "groups = {'lab': {'users': [5]}}",
    "groups = {'lab': {'unix_groups': [5]}}",
    "groups = {'lab': {'parent': 5}}",
    "groups = {'lab': {}, 'vision': {'parent': 'lap'}}",
    "groups = {'lab': {'parent': 'lab'}}",
    "groups = {'a': {'parent': 'b'}, 'b': {'parent': 'a'}}",
    "groups = {'lab': {'users': ['ada']}, 'vision': {'users': ['ada']}}",
    "groups = {'lab': {'users': '*'}, 'vision': {'users': '*'}}",
    "groups = {'lab': {'unix_groups': ['x']}, 'vision': {'unix_groups': ['x']}}",
    "groups = {'lab': {'gpu_seconds_per_day': []}}",
    "groups = {'lab': {'gpu_seconds_per_day': {'seconds': '8h', 'renews': 'midnight'}}}",
    "groups = {'lab': {'gpu_seconds_per_day': {'second': 5}}}",
    "groups = {'lab': {'guarantee': '60%'}, 'vision': {'guarantee': '50%'}}",
    "groups = {'a': {'guarantee': '2 devices'}, 'b': {'parent': 'a', 'guarantee': '3 devices'}}",
    "groups = {'a': {'cap': '9%'}, 'b': {'parent': 'a', 'guarantee': '10%'}}",
    "groups = {'lab': {'cap': '20%'}, 'vision': {'parent': 'lab', 'cap': '30%'}}",
)

#: Keys of a schedule, without its name and time zone. The product refuses each set of keys.
WRONG_SCHEDULES = (
    "'days': 'mon-fry', 'set': {'linger': 1}",
    "'days': [], 'set': {'linger': 1}",
    "'hours': '8pm', 'set': {'linger': 1}",
    "'hours': '25:00-26:00', 'set': {'linger': 1}",
    "'hours': '08:00-08:00', 'set': {'linger': 1}",
    "'time_zone': 'Europe/Berln', 'set': {'linger': 1}",
    "'hour': '08:00-20:00', 'set': {'linger': 1}",
    "'set': {}",
    "'set': {'lingr': 1}",
    "'set': {'devices': [0]}",
    "'set': {'schedules': []}",
    "'set': {'groups': {'labs': {'cap': '90%'}}}",
    "'set': {'groups': {'lab': {'users': ['ada']}}}",
    "'set': {'groups': {'lab': {'guarantee': '90%'}}}",
    "'set': {'idle_timeout': 'soon'}",
    "'set': {'default_priority': 'urgent'}",
)


def configuration(sheet: Sheet) -> None:
    """Write the messages about wrong configuration files."""
    with tempfile.TemporaryDirectory() as folder, _only(folder):
        path = Path(folder, "jupyter_server_config.py")

        def put(situation: str, text: str) -> None:
            path.write_text(text, encoding="utf-8")
            try:
                load_settings()
            except ConfigError as error:
                said = str(error).replace(folder, "/etc/jupyter")
                sheet.put(situation, said, error.code)
            else:
                raise AssertionError(f"accepted: {text}")

        for line in WRONG:
            put(f"c.GPUPool.{line[:90]}", f"c.GPUPool.{line}")
        groups = "c.GPUPool.groups = {'lab': {'guarantee': '40%', 'cap': '60%'}}\n"
        for line in WRONG_SCHEDULES:
            entry = "{'name': 'night', 'time_zone': 'UTC', " + line + "}"
            put(f"A schedule {{{line}}}", f"{groups}c.GPUPool.schedules = [{entry}]")
        put("A schedule without 'name' and 'set'", "c.GPUPool.schedules = [{}, 5]")
        twice = "{'name': 'night', 'set': {'linger': 1}}"
        put("Two schedules of one name", f"c.GPUPool.schedules = [{twice}, {twice}]")
        put("Three mistakes", "c.GPUPool.lingr = 1\nc.GPUPool.turn = 0\nc.GPUPool.guard = 5")
        put("c.GpuPool.idle_timeout = 60", "c.GpuPool.idle_timeout = 60")
        put("A file that is not Python", "c.GPUPool.idle_timeout =")
        put("A file that ends the program", "import sys; sys.exit(3)")
        path.unlink()
        try:
            load_settings([Path("/etc/gpupool.py")])
        except ConfigError as error:
            sheet.put("A missing file", str(error), error.code)
    in_force: Mapping[str, Any] = {
        "config": {"options": {"idle_timeout": 60.0}, "origins": {"idle_timeout": "/etc/pool.py"}},
        "broker": {"problem": ""},
        "pid": 4711,
    }
    with tempfile.TemporaryDirectory() as folder, _only(folder):
        sheet.put("Another configuration is in force", notice({}, in_force))


def sizes(sheet: Sheet) -> None:
    """Write the messages about wrong sizes and durations. They are the same in all commands."""
    for text in ("12", "0GiB", "much", "9999999TiB"):
        sheet.put(f"The size {text!r}", _wrong(parse_bytes, text))
    for text in ("soon", "0s"):
        sheet.put(f"The duration {text!r}", _wrong(parse_seconds, text))


def _wrong(read: Any, text: str) -> str:
    try:
        read(text)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"accepted: {text}")
