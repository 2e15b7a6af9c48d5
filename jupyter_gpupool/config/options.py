# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``c.GPUPool.*``: every option with its unit, default and an example."""

from __future__ import annotations

import json
import os
from typing import Any, Callable, Mapping, TypeVar, cast

from traitlets import Any as AnyTrait
from traitlets import Bool, Dict, Enum, Int, List, TraitError, TraitType, Unicode, validate
from traitlets.config import Configurable

from .. import machine
from ..pool.model import AttachPolicy, PoolSettings
from ..text import did_you_mean, one_of
from ..units import format_bytes
from .quantities import Seconds, Share, Size, memory_total
from .settings import (
    EMULATE_VARIABLE,
    MIN_TURN,
    BrokerSettings,
    ForeignPolicy,
    ManagedPolicy,
    OverusePolicy,
    check_machine,
    read_count,
    read_devices,
    read_host_memory,
    read_host_reserve,
    read_path,
    read_port,
    read_priority_classes,
    read_quotas,
    read_socket,
    refuse,
)

_POOL = PoolSettings()
_T = TypeVar("_T", bound="TraitType[Any, Any]")


def _option(trait: _T, what: str, *, unit: str, default: str, example: str) -> _T:
    """Return ``trait`` as a configuration option with all that its reader needs to know."""
    trait.help = f"{what}\n\nUnit: {unit}. Default: {default}. Example: c.GPUPool.{example}"
    trait.tag(config=True, what=what, unit=unit, default=default, example=f"c.GPUPool.{example}")
    return trait


class _Overuse(Enum):  # type: ignore[type-arg]
    """The policies for overuse; a configuration of an earlier version may name a third one."""

    def validate(self, obj: Any, value: Any) -> Any:
        """Return ``value``, or say which one replaces it."""
        if value == "suspend":
            raise TraitError(
                "'suspend' is not a value any more: a kernel that goes around the guard can take "
                "the memory again. Write 'report', or 'end' to end such kernels."
            )
        return super().validate(obj, value)


class GPUPool(Configurable):
    """Everything an admin may decide about a GPU pool; read by the broker, never by kernels."""

    devices = _option(
        List(AnyTrait(), default_value=None, allow_none=True),
        "GPUs of the pool: the index that nvidia-smi shows, or the beginning of the UUID, of each.",
        unit="list of indices or UUIDs",
        default="None (every GPU of the machine)",
        example='devices = [0, "GPU-5d1c"]',
    )
    emulate = _option(
        Unicode(""),
        "Emulate these GPUs in host memory, for machines without one. The environment variable "
        "GPUPOOL_EMULATE fills this in where no configuration sets it.",
        unit="machine, as COUNTxSIZE with options after commas",
        default="'' (use the real driver)",
        example='emulate = "2x16GiB"',
    )
    attach = _option(
        Enum(("lazy", "cell", "manual"), default_value="lazy"),
        "When a kernel gets its slice: 'lazy' at its first CUDA call, 'cell' when a cell starts, "
        "'manual' only on %gpu attach or %%gpu. 'lazy' needs the guard (see guard); where no GPU "
        "of the pool has passed the guard's self-test it acts as 'cell', and `jupyter gpupool "
        "doctor` says why.",
        unit="'lazy', 'cell' or 'manual'",
        default="'lazy'",
        example='attach = "manual"',
    )
    guard = _option(
        Bool(True),
        "Start kernels under the guard, a library between them and the CUDA driver: it holds their "
        "CUDA calls while they have no slice, and refuses allocations beyond it as the driver "
        "would. A limit for well-behaved programs, not a security boundary. Without it a slice is "
        "a promise, and 'lazy' acts as 'cell'.",
        unit="True or False",
        default="True",
        example="guard = False",
    )
    allow_unguarded = _option(
        Bool(False),
        "Start a kernel without the guard where the page that it shares with the broker cannot be "
        "made, which mostly means that shared memory is full. Otherwise it is refused: nothing "
        "would keep its CUDA calls within the slice.",
        unit="True or False",
        default="False",
        example="allow_unguarded = True",
    )
    default_memory = _option(
        Size(_POOL.default_memory),
        "Device memory that a kernel is guaranteed when it does not ask, CUDA context included. "
        "Where the largest GPU, or max_memory_per_kernel, has less, it is that much.",
        unit="bytes, or text such as '4GiB'",
        default="4 GiB",
        example='default_memory = "6GiB"',
    )
    default_limit = _option(
        Size(None, allow_none=True),
        "Device memory up to which a kernel that does not ask may grow while the GPU has memory "
        "free, beyond what it is guaranteed. Without the guard nothing grows.",
        unit="bytes, or text such as '12GiB'",
        default="None (the same as default_memory)",
        example='default_limit = "12GiB"',
    )
    max_memory_per_kernel = _option(
        Size(None, allow_none=True),
        "The most device memory that one kernel may ask for on one GPU.",
        unit="bytes, or text such as '24GiB'",
        default="None (the size of the GPU)",
        example='max_memory_per_kernel = "24GiB"',
    )
    quotas = _option(
        Dict(),
        "Limits per user; '*' is everybody who is not named. Of each user's kernels together: "
        "memory (granted device bytes), devices (GPUs), leases (kernels attached at once), "
        "suspended (host bytes of suspended state). What is left out has no limit.",
        unit="dict of user name to dict",
        default="{} (no limits)",
        example='quotas = {"*": {"memory": "16GiB", "leases": 2}, "ada": {"memory": "48GiB"}}',
    )
    max_sessions_per_user = _option(
        Int(256),
        "Kernels that one user may have in the pool, with a slice or without. Not a quota of GPUs "
        "but a bound on what one user can cost the broker.",
        unit="whole number, 1 at least",
        default="256",
        example="max_sessions_per_user = 50",
    )
    priority_classes = _option(
        Dict(default_value=dict(_POOL.priority_classes)),
        "Priority classes by name. The higher number goes first in the queue.",
        unit="dict of name to whole number",
        default="{'interactive': 200, 'notebook': 100, 'batch': 0}",
        example='priority_classes = {"urgent": 500, "notebook": 100}',
    )
    default_priority = _option(
        Unicode(_POOL.default_priority),
        "Priority class of a kernel that does not ask for one.",
        unit="name in priority_classes",
        default="'notebook'",
        example='default_priority = "interactive"',
    )
    idle_timeout = _option(
        Seconds(_POOL.idle_timeout),
        "A slice goes back to the pool after this long without use: without GPU work under 'lazy', "
        "without a running cell under 'cell' and 'manual'.",
        unit="seconds, or text such as '10m'",
        default="300",
        example="idle_timeout = 600",
    )
    quiet_after = _option(
        Seconds(1.0),
        "Under 'lazy', a kernel that has made no CUDA call for this long, with none running, "
        "counts as not using its GPU, whatever its cell does meanwhile. While another kernel "
        "waits, the end of its cell counts at once.",
        unit="seconds, or text such as '5s'",
        default="1",
        example="quiet_after = 5",
    )
    reclaim_after = _option(
        Seconds(_POOL.reclaim_after, zero=True),
        "A waiting kernel may take a slice that has been idle for this long.",
        unit="seconds, or text such as '30s'",
        default="0 (at once)",
        example="reclaim_after = 30",
    )
    max_wait = _option(
        Seconds(_POOL.max_wait, allow_none=True),
        "A cell waits at most this long for a slice, then fails with an error that says why.",
        unit="seconds, or text such as '1h'",
        default="None (no limit; the user can interrupt)",
        example='max_wait = "30m"',
    )
    reserve = _option(
        Size(_POOL.reserve, zero=True),
        "Memory of each GPU that is never granted, for use outside the pool.",
        unit="bytes, or text such as '512MiB'",
        default="0",
        example='reserve = "512MiB"',
    )
    host_memory = _option(
        AnyTrait("50%"),
        "Host memory that suspended kernels may take in all. A percentage counts from the "
        "machine's memory, or from the broker's cgroup limit if that is less.",
        unit="bytes, text such as '64GiB', or per cent such as '50%'",
        default="'50%'",
        example='host_memory = "64GiB"',
    )
    host_reserve = _option(
        AnyTrait("10%"),
        "Host memory that a suspend leaves free, of the machine and of each control group "
        "(cgroup) above the kernel. A percentage counts from each of these limits and is 1 GiB at "
        "least, but at most a quarter of a small limit; of a control group, a size is a quarter at "
        "most, too. Where less than this is free and kernels are suspended, the largest suspended "
        "state that has room on a GPU goes back there, and its user is warned.",
        unit="bytes, text such as '4GiB', or per cent such as '10%'; 0 for none",
        default="'10%'",
        example='host_reserve = "8GiB"',
    )
    resume_headroom = _option(
        Size(_POOL.resume_headroom, zero=True),
        "Device memory that must be free beyond what a suspended kernel held before it is resumed, "
        "at most a sixteenth of the GPU. A driver may need more to bring a process back than it "
        "freed, and a resume without room can cost the process; it goes back to the pool as soon "
        "as the kernel is resumed.",
        unit="bytes, or text such as '512MiB'",
        default="256 MiB",
        example='resume_headroom = "512MiB"',
    )
    max_swap_overhead = _option(
        Share(_POOL.max_swap_overhead, zero=True),
        "The part of the time that moving kernels may take while they contend for a GPU. A kernel "
        "with short pauses stays until it has used its GPU for so long that its move is this part "
        "of it. A kernel that computes nothing stays no longer than its move takes while somebody "
        "waits. 0: a waiting kernel gets an idle slice at once, whatever moving it costs.",
        unit="number from 0 to below 1, or per cent such as '10%'",
        default="0.1",
        example="max_swap_overhead = 0.05",
    )
    retest_after = _option(
        Seconds(60.0, zero=True),
        "A GPU that is out of service for a failure (an Xid, a self-test) is tested again after so "
        "long, and after twice as long each time it fails again, an hour at most. It is in "
        "service again when it passes. 0: only on `jupyter gpupool doctor --retest`.",
        unit="seconds, or text such as '5m'",
        default="60",
        example='retest_after = "5m"',
    )
    turn = _option(
        Seconds(0.1, least=MIN_TURN),
        "Length of one turn when kernels that share a GPU compute at the same time and one of "
        "them has asked for less than all of it (compute).",
        unit="seconds, 0.01 at least",
        default="0.1",
        example="turn = 0.25",
    )
    managed_memory = _option(
        Enum(("refuse", "allow"), default_value="refuse"),
        "cudaMallocManaged in kernels under the guard: the driver cannot suspend a process that "
        "has such memory, and it is not bound to the slice. 'refuse' returns an error "
        "(CUDA_ERROR_NOT_SUPPORTED), 'allow' counts it, and the kernel then keeps its slice.",
        unit="'refuse' or 'allow'",
        default="'refuse'",
        example='managed_memory = "allow"',
    )
    overuse = _option(
        _Overuse(("report", "end"), default_value="report"),
        "What is done about a kernel that holds more device memory than it was granted, which "
        "takes a program that goes around the guard, or no guard: 'report' logs it and shows it "
        "in the status, 'end' ends the kernel.",
        unit="'report' or 'end'",
        default="'report'",
        example='overuse = "end"',
    )
    foreign_processes = _option(
        Enum(("count", "report", "end"), default_value="count"),
        "Processes on a pool GPU that are not of the pool: 'count' takes their memory off what can "
        "be granted, 'report' also logs each one, 'end' also ends those that belong to a user who "
        "has a kernel in the pool.",
        unit="'count', 'report' or 'end'",
        default="'count'",
        example='foreign_processes = "report"',
    )
    socket = _option(
        Unicode(""),
        "Path of the broker's unix socket, at most 107 bytes.",
        unit="absolute path",
        default="'' ($GPUPOOL_SOCKET, else /run/gpupool/broker.sock if it is there, else per user)",
        example='socket = "/run/gpupool/broker.sock"',
    )
    device_python = _option(
        Unicode(""),
        "The Python that runs the broker's device processes: its environment has NVIDIA's packages "
        "(cuda-core, cuda-bindings, nvidia-ml-py), which no other part of the pool needs. "
        "`jupyter gpupool install-devices` makes one that the broker finds by itself.",
        unit="absolute path",
        default="'' (the one of install-devices, else the broker's own Python)",
        example='device_python = "/opt/gpupool/devices/bin/python"',
    )
    state_dir = _option(
        Unicode(""),
        "Folder of the broker's journal, one for each machine. On a network file system (NFS, SMB, "
        "Lustre, FUSE and the like) a journal is not safe: it is in /var/tmp/gpupool-UID then, and "
        "the log and `jupyter gpupool doctor` say so.",
        unit="absolute path",
        default="'' (root: /var/lib/gpupool; others: ~/.local/state/gpupool)",
        example='state_dir = "/var/lib/gpupool"',
    )
    journal_size = _option(
        Size(256 << 20, least=1 << 20),
        "Disk space of the journal, from which reports and timelines are drawn: the oldest rows "
        "are dropped beyond it, and beyond 500,000. Its write-ahead log takes about 16 MiB more.",
        unit="bytes, or text such as '1GiB'; 1 MiB at least",
        default="256 MiB",
        example='journal_size = "1GiB"',
    )
    sample_interval = _option(
        Seconds(1.0),
        "How often device and host memory are read.",
        unit="seconds",
        default="1",
        example="sample_interval = 2",
    )
    lock_timeout = _option(
        Seconds(5.0),
        "How long a suspend waits for the kernel's running GPU work before it gives up.",
        unit="seconds",
        default="5",
        example="lock_timeout = 10",
    )
    linger = _option(
        Seconds(30.0, zero=True),
        "A broker that was started for one user ends this long after its last kernel.",
        unit="seconds, or text such as '5m'",
        default="30",
        example='linger = "5m"',
    )
    metrics_port = _option(
        Int(0),
        "Serve metrics of the whole pool for Prometheus at this port of 127.0.0.1, and there only: "
        "http://127.0.0.1:PORT/metrics. Every user of the machine can read them; they name no "
        "person.",
        unit="TCP port, 1 to 65535",
        default="0 (not served)",
        example="metrics_port = 9845",
    )
    admins = _option(
        List(Unicode()),
        "Users who may see and release every kernel, besides root and the broker's own user.",
        unit="list of user names",
        default="[]",
        example='admins = ["ada"]',
    )

    @validate("devices", "quotas", "priority_classes", "host_memory", "host_reserve", "socket",
              "device_python", "state_dir", "metrics_port", "max_sessions_per_user")  # fmt: skip
    def _check_one(self, proposal: Mapping[str, Any]) -> Any:
        # Raises for a bad value, but keeps what the admin wrote: ``settings`` reads it.
        name, value = proposal["trait"].name, proposal["value"]
        readers: dict[str, Callable[[Any], object]] = {
            "devices": lambda v: v if v is None else read_devices(v),
            "quotas": read_quotas,
            "priority_classes": read_priority_classes,
            "host_memory": lambda v: read_host_memory(v, 1 << 40),
            "host_reserve": read_host_reserve,
            "socket": read_socket,
            "device_python": lambda v: v and read_path(v),
            "state_dir": lambda v: v and read_path(v),
            "metrics_port": read_port,
            "max_sessions_per_user": read_count,
        }
        try:
            readers[name](value)
        except ValueError as error:
            raise TraitError(str(error)) from None
        return value

    def settings(
        self, *, host_total: int | None = None, environ: Mapping[str, str] | None = None
    ) -> BrokerSettings:
        """Return what the broker works with.

        Parameters
        ----------
        host_total:
            Bytes of host memory that percentages count from; None: read from the machine.
        environ:
            Where ``GPUPOOL_EMULATE`` is looked up; None: ``os.environ``.

        Raises
        ------
        ConfigError
            If values that are good on their own do not go together.
        """
        environ = os.environ if environ is None else environ
        limit = self._check_sizes()
        classes = read_priority_classes(self.priority_classes)
        if self.default_priority not in classes:
            hint = did_you_mean(
                self.default_priority, classes, then=f"Allowed are {one_of(classes)}."
            )
            refuse("default_priority", f"{self.default_priority!r} is no priority class. {hint}")
        notes = []
        total = memory_total() if host_total is None else host_total
        host_memory = read_host_memory(self.host_memory, total)
        if host_memory > total:
            notes.append(
                f"c.GPUPool.host_memory is {format_bytes(host_memory)} and this machine has "
                f"{format_bytes(total)}; a suspend is still started only if its copy fits."
            )
        return BrokerSettings(
            pool=PoolSettings(
                default_memory=self.default_memory,
                default_limit=limit,
                max_memory_per_kernel=self.max_memory_per_kernel,
                quotas=read_quotas(self.quotas),
                priority_classes=classes,
                default_priority=self.default_priority,
                idle_timeout=self.idle_timeout,
                reclaim_after=self.reclaim_after,
                max_wait=self.max_wait,
                reserve=self.reserve,
                host_memory=host_memory,
                resume_headroom=self.resume_headroom,
                max_swap_overhead=self.max_swap_overhead,
            ),
            attach=cast(AttachPolicy, self.attach),
            guard=self.guard,
            allow_unguarded=self.allow_unguarded,
            quiet_after=self.quiet_after,
            turn=self.turn,
            retest_after=self.retest_after,
            managed_memory=cast(ManagedPolicy, self.managed_memory),
            overuse=cast(OverusePolicy, self.overuse),
            emulate=self._machine(environ),
            devices=read_devices(self.devices) if self.devices else None,
            socket=read_socket(self.socket),
            device_python=str(read_path(self.device_python)) if self.device_python else "",
            state_dir=read_path(self.state_dir) if self.state_dir else machine.state_dir(),
            journal_size=self.journal_size,
            foreign_processes=cast(ForeignPolicy, self.foreign_processes),
            sample_interval=self.sample_interval,
            lock_timeout=self.lock_timeout,
            linger=self.linger,
            max_sessions_per_user=self.max_sessions_per_user,
            metrics_port=self.metrics_port,
            admins=tuple(self.admins),
            notes=tuple(notes),
            host_reserve=read_host_reserve(self.host_reserve),
        )

    def chosen(self) -> dict[str, Any]:
        """Return the options that do not have their default, as JSON values."""
        found = {}
        for name, trait in self.class_traits(config=True).items():
            value = getattr(self, name)
            if value != trait.default():
                found[name] = json.loads(json.dumps(value, default=str))
        return found

    def _check_sizes(self) -> int:
        """Return the default limit in bytes, once the three sizes fit together."""
        memory, most = self.default_memory, self.max_memory_per_kernel
        limit: int = memory if self.default_limit is None else self.default_limit
        if limit < memory:
            refuse(
                "default_limit",
                f"{format_bytes(limit)} is below default_memory ({format_bytes(memory)}).",
                next_step="Raise default_limit or lower default_memory.",
            )
        if most is not None and limit > most:
            name, value = ("default_memory", memory) if memory > most else ("default_limit", limit)
            refuse(
                name,
                f"{format_bytes(value)} is above max_memory_per_kernel ({format_bytes(most)}).",
                next_step=f"Lower {name} or raise max_memory_per_kernel.",
            )
        return limit

    def _machine(self, environ: Mapping[str, str]) -> str:
        if self.emulate or "emulate" in self.config.get("GPUPool", {}):
            text, origin = self.emulate, "c.GPUPool.emulate"
        else:
            text, origin = environ.get(EMULATE_VARIABLE, ""), EMULATE_VARIABLE
        if text:
            check_machine(text, origin)
        return text
