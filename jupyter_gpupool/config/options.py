# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``c.GPUPool.*``: every option with its unit, default and an example."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from typing import Any, Callable, Iterator, Mapping, TypeVar, get_args

from traitlets import Any as AnyTrait
from traitlets import Bool, Dict, Enum, Int, List, TraitError, TraitType, Unicode, validate
from traitlets.config import Configurable

from ..cgroups import Host
from ..pool.model import Group, PoolSettings, Unsuspendable
from ..states import AttachPolicy
from ..text import did_you_mean, one_of
from ..units import format_bytes
from .grouping import Members, read_groups
from .mistakes import Fault, WrongConfiguration
from .reading import (
    Seconds,
    Share,
    Size,
    read_count,
    read_devices,
    read_folder,
    read_folders,
    read_function,
    read_host_memory,
    read_host_reserve,
    read_identity,
    read_port,
    read_preempt,
    read_priority_classes,
    read_program,
    read_quotas,
    read_socket,
    read_uid,
    read_unsuspendable_after,
)
from .schedules import read_schedules
from .settings import (
    EMULATE_VARIABLE,
    BrokerSettings,
    ForeignPolicy,
    ManagedPolicy,
    OnLedgerLoss,
    OverusePolicy,
    wrong_machine,
)
from .tree import check_groups

#: The shortest turn in seconds. A shorter turn is useless, because the broker's timers and a
#: kernel's polling take milliseconds.
MIN_TURN = 0.01

_POOL = PoolSettings()
_T = TypeVar("_T", bound="TraitType[Any, Any]")


def _option(
    trait: _T,
    what: str,
    *,
    unit: str,
    default: str,
    example: str,
    read: Callable[[Any], object] | None = None,
    restart: bool = False,
) -> _T:
    """Return ``trait`` as an option of the configuration.

    ``read`` is a function that converts the admin's value to the value for the broker. It raises
    ``ValueError`` with a sentence if the value is wrong. Without ``read``, the broker uses the
    value unchanged. If ``restart``, a running broker keeps the old value until its restart.
    """
    trait.help = f"{what}\n\nUnit: {unit}. Default: {default}. Example: c.GPUPool.{example}"
    trait.tag(
        config=True, what=what, unit=unit, default=default, example=f"c.GPUPool.{example}",
        read=read, restart=restart,
    )  # fmt: skip
    return trait


def _reader(trait: object) -> Callable[[Any], Any] | None:
    """Return the reader of an option; None if the broker uses its values unchanged."""
    return trait.metadata.get("read") if isinstance(trait, TraitType) else None


def _choice(policy: Any, what: str, *, example: str, trait: Any = Enum) -> Any:
    """Return an option that takes the values of a ``Literal``; the first value is the default."""
    values = get_args(policy)
    return _option(
        trait(values, default_value=values[0]), what,
        unit=one_of(values), default=repr(values[0]), example=example,
    )  # fmt: skip


class _Overuse(Enum):  # type: ignore[type-arg]
    """A choice of policies for overuse, which explains why the old policy "suspend" is refused."""

    def validate(self, obj: Any, value: Any) -> Any:
        """Return ``value``; for an old value, raise an error that names its replacement."""
        if value == "suspend":
            raise TraitError(
                "'suspend' is no longer allowed: after a suspend, a kernel that goes around the "
                "guard can take the memory again. Write 'report', or 'end' to end such kernels."
            )
        return super().validate(obj, value)


class GPUPool(Configurable):
    """All options by which an admin configures a GPU pool. Brokers read them, kernels never do."""

    devices = _option(
        List(AnyTrait(), default_value=None, allow_none=True),
        "The GPUs of the pool. For each GPU, write the index that nvidia-smi shows, or the "
        "beginning of its UUID.",
        unit="list of indices or UUIDs",
        default="None (every GPU of the machine)",
        example='devices = [0, "GPU-5d1c"]',
        read=read_devices,
        restart=True,
    )
    emulate = _option(
        Unicode(""),
        "Emulate these GPUs in host memory, for machines without one. The environment variable "
        "GPUPOOL_EMULATE is used if no configuration sets this option.",
        unit="machine, as COUNTxSIZE with options after commas",
        default="'' (use the real driver)",
        example='emulate = "2x16GiB"',
        restart=True,
    )
    attach = _choice(
        AttachPolicy,
        "When a kernel gets its slice: 'lazy' at its first CUDA call, 'cell' when a cell starts, "
        "'manual' only on %gpu attach or %%gpu. 'lazy' needs the guard (see guard); if no GPU of "
        "the pool has passed the guard's self-test, 'lazy' acts as 'cell', and `jupyter gpupool "
        "doctor` shows the reason.",
        example='attach = "manual"',
    )
    guard = _option(
        Bool(True),
        "Start kernels under the guard, a library between a kernel and the CUDA driver. While a "
        "kernel has no slice, the guard lets its CUDA calls wait. The guard also refuses "
        "allocations beyond the slice, as the driver would. This is a limit for well-behaved "
        "programs, not a security boundary. Without the guard, nothing enforces a slice, and "
        "'lazy' acts as 'cell'.",
        unit="True or False",
        default="True",
        example="guard = False",
        restart=True,
    )
    allow_unguarded = _option(
        Bool(False),
        "Start a kernel without the guard if the page that it shares with the broker cannot be "
        "made (usually because shared memory is full). By default the broker refuses such a "
        "kernel, because nothing would keep its CUDA calls within the slice.",
        unit="True or False",
        default="False",
        example="allow_unguarded = True",
    )
    default_memory = _option(
        Size(_POOL.default_memory),
        "Guaranteed device memory of a kernel that asks for no size. It includes the kernel's CUDA "
        "context. It is at most max_memory_per_kernel, and at most the size of the largest GPU.",
        unit="bytes, or text such as '4GiB'",
        default="4 GiB",
        example='default_memory = "6GiB"',
    )
    default_limit = _option(
        Size(None, allow_none=True),
        "A kernel that names no limit may grow beyond its guarantee, up to this device memory, "
        "while the GPU has free memory. When another kernel needs its own guaranteed memory, the "
        "pool first takes back such growth. If necessary, it suspends the kernel that has grown, "
        "even during a cell. Only kernels under the guard can grow; without the guard, a slice "
        "keeps its first size. Programs that take all free memory at their start (vLLM) should "
        "name a limit. Otherwise they take turns on a GPU that they could share.",
        unit="bytes, or text such as '12GiB'",
        default="None (the whole GPU)",
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
        "Limits per user; '*' stands for all users who are not named. For all kernels of a user "
        "together: memory (granted device bytes), devices (GPUs), leases (kernels attached at "
        "once), suspended (host bytes of suspended state), gpu_seconds_per_day (as in groups). A "
        "missing limit means no limit.",
        unit="dict of user name to dict",
        default="{} (no limits)",
        example='quotas = {"*": {"memory": "16GiB", "leases": 2}, "ada": {"memory": "48GiB"}}',
        read=read_quotas,
    )
    groups = _option(
        Dict(),
        "Groups of users, by name, and what each gets of the pool. Three keys say who belongs to a "
        "group: users is a list of names, or '*' for all users that are in no other group; "
        "unix_groups and hub_groups are lists. guarantee is the memory that the group gets back at "
        "once from groups that borrow it. cap is the most memory that the group may have. Write "
        "each of these two as per cent of the pool's memory, as devices, or as a size. weight "
        "divides the rest: a group of weight 2 gets twice as much as a group of weight 1, the "
        "default. parent names the group that contains this one. gpu_seconds_per_day is a budget: "
        "GPU-seconds, or text such as '8h', or a dict with up to four keys. seconds is the budget. "
        "rule is 'window' (the default: the whole budget is renewed at one time of the day) or "
        "'refill' (the budget is renewed a little at a time, continuously). renews is the time of "
        "the day for 'window', in UTC (default: '00:00'). The key then says what happens when the "
        "budget is used up: with 'borrow' (the default), the group gets only memory that no other "
        "session wants; with 'refuse', it gets no new slice; with 'stop', the pool also suspends "
        "its running kernels. A user belongs to the group that names the user. If no group names "
        "the user, a group with a Unix group or a Hub group of the user counts. If there is no "
        "such group, the group with '*' counts. If several groups count, the one with the lowest "
        "order wins. A kernel may choose another group that its user belongs to.",
        unit="dict of group name to dict",
        default="{} (no groups)",
        example='groups = {"lab": {"guarantee": "60%", "users": ["ada"]}, "rest": {"users": "*"}}',
        read=read_groups,
    )
    cluster_nodes = _option(
        List(Unicode()),
        "The machines that share one set of limits. Two kinds of limits then count on all these "
        "machines together: quotas (memory, devices, leases, GPU-seconds), and limits of groups "
        "(caps, guarantees, GPU-seconds). The cluster's ledger and all its brokers must read the "
        "same list, quotas and groups. If a machine never comes back, remove it from the list. See "
        "docs/cluster.md.",
        unit="list of names of machines",
        default="[] (this machine alone)",
        example='cluster_nodes = ["gpu1", "gpu2"]',
        read=tuple,
        restart=True,
    )
    cluster_node = _option(
        Unicode(""),
        "The name of this machine in cluster_nodes.",
        unit="name",
        default="'' (its host name)",
        example='cluster_node = "gpu1"',
        restart=True,
    )
    cluster_agent = _option(
        Unicode("gpupool"),
        "The user whose process may connect this broker to the ledger of cluster_nodes. Processes "
        "of root and of the broker's own user may always do this. Such a process can only lend "
        "limits to this machine.",
        unit="name of a user",
        default="'gpupool'",
        example='cluster_agent = "gpupool"',
    )
    cluster_identity = _option(
        Unicode(""),
        "How this machine's broker identifies users whose servers run on other machines of "
        "cluster_nodes, before it starts a kernel for them: 'munge' (Debian's package munge), "
        "'munge:/path' for another socket of its daemon, or the address of a JupyterHub's API, "
        "which then checks the users' tokens. Without this option this machine runs no kernels of "
        "other machines.",
        unit="'munge', 'munge:/path', or a URL",
        default="'' (no kernels of other machines)",
        example='cluster_identity = "munge"',
        read=read_identity,
        restart=True,
    )
    cluster_address = _option(
        Unicode(""),
        "The address at which kernels on this machine listen for servers on other machines.",
        unit="IPv4 address",
        default="'' (the address from which this machine reaches other hosts)",
        example='cluster_address = "10.0.0.2"',
    )
    cluster_min_uid = _option(
        Int(1000),
        "The lowest user id for which this machine's broker starts kernels of servers on other "
        "machines. Lower ids belong to services of the system, and a user of a JupyterHub may have "
        "the same name as such a service. The broker never starts a kernel for root.",
        unit="user id, 1 at least",
        default="1000",
        example="cluster_min_uid = 500",
        read=read_uid,
    )
    cluster_data = _option(
        List(Unicode()),
        "Folders on this machine's own disks, with data that other machines of cluster_nodes "
        "lack. A kernel that works below one of these folders starts here, if no other machine "
        "has more room or a shorter queue. All users of the cluster can read the list.",
        unit="list of at most 8 absolute paths",
        default="[] (all data is on file systems that the machines share)",
        example='cluster_data = ["/scratch/imagenet"]',
        read=read_folders,
    )
    on_ledger_loss = _choice(
        OnLedgerLoss,
        "What happens while the ledger of cluster_nodes does not answer. With 'closed', kernels "
        "keep their slices, but users and groups with a limit get no new slice. With 'min_share', "
        "each such user and group gets cluster_min_share on each machine. Together, the machines "
        "may then exceed a limit by cluster_min_share times the number of machines.",
        example='on_ledger_loss = "min_share"',
    )
    cluster_min_share = _option(
        Size(4 << 30),
        "Device memory that a user or a group may have on this machine, in one slice on one GPU, "
        "while the ledger does not answer; see on_ledger_loss.",
        unit="bytes, or text such as '8GiB'",
        default="4 GiB",
        example='cluster_min_share = "8GiB"',
    )
    hub_groups = _option(
        AnyTrait(None, allow_none=True),
        "A function that gets the name of a user and returns the names of the user's groups in "
        "JupyterHub, or in another directory that this machine does not know. The broker calls the "
        "function in a thread when a user opens a session (at most every five minutes for each "
        "user), and after SIGHUP. If a call fails, the last result counts. A kernel cannot claim a "
        "group.",
        unit="function, in a Python configuration file",
        default="None (no user is in a Hub group)",
        example='hub_groups = lambda user: ["night"] if user in ("ada", "bob") else []',
        read=read_function,
    )
    fair_share_half_life = _option(
        Seconds(_POOL.half_life, zero=True),
        "The pool orders the queue by the use of users and groups. After this time their past use "
        "counts half, after twice this time a quarter, and so on. 0: past use does not count.",
        unit="seconds, or text such as '8h'",
        default="28800 (8 hours)",
        example='fair_share_half_life = "2d"',
    )
    preempt = _option(
        List(Unicode(), default_value=sorted(_POOL.preempt)),
        "The rules by which the pool may suspend a computing kernel during a cell. The kernel "
        "loses nothing, waits in the queue, and continues without any action. 'guarantee': the "
        "computing kernel's group has more than its guarantee, and the waiting kernel's group has "
        "less than its own guarantee; 'class': the waiting kernel has a higher priority class; "
        "'turns': both kernels have the same class, and the time slice of the computing kernel is "
        "over; 'burst': the computing kernel has grown beyond its guaranteed memory, and the "
        "waiting kernel needs its own guaranteed memory. []: only idle kernels give up their "
        "slice.",
        unit="list of 'burst', 'class', 'guarantee', 'turns'",
        default=repr(sorted(_POOL.preempt)),
        example='preempt = ["guarantee", "class"]',
        read=read_preempt,
    )
    unsuspendable = _choice(
        Unsuspendable,
        "What the broker does if other kernels wait for the slice of a kernel that cannot be "
        "suspended. The reason may be that the driver cannot suspend the kernel, that three "
        "attempts in succession have failed, or that the state is too large for the kernel's "
        "control group. 'warn' warns the kernel's user, 'ask' later also asks the user to end the "
        "kernel, 'end' also ends the kernel after that. See unsuspendable_after.",
        example='unsuspendable = "end"',
    )
    unsuspendable_after = _option(
        List(AnyTrait(), default_value=["1m", "10m", "1h"]),
        "Three waiting times of other kernels. After the first, the broker warns the user of the "
        "kernel that cannot be suspended. After the second, it asks the user to end that kernel. "
        "After the third, it ends the kernel. See unsuspendable.",
        unit="list of three durations, each longer than the one before",
        default="['1m', '10m', '1h']",
        example='unsuspendable_after = ["5m", "30m", "8h"]',
        read=read_unsuspendable_after,
    )
    schedules = _option(
        List(AnyTrait()),
        "Other values of options for some hours of some days. Each rule has a name, the options "
        "that it sets (set), the days on which it begins (days, 'mon-fri' or 'sat, sun'; default: "
        "every day), its hours ('20:00-08:00' ends the next morning; default: the whole day) and a "
        "time_zone (default: the machine's). If several rules are in force at the same time, the "
        "last of them in the list wins. A dict such as quotas or groups is merged key by key into "
        "the value in force; every other value replaces it. A schedule cannot set options that "
        "need a restart of the broker, nor who is in which group.",
        unit="list of dicts",
        default="[] (the same at all times)",
        example='schedules = [{"name": "night", "hours": "20:00-08:00", "set": {"linger": "1h"}}]',
        read=read_schedules,
    )
    max_sessions_per_user = _option(
        Int(256),
        "The most kernels that one user may have in the pool, with a slice or without. This is "
        "not a quota of GPUs: it limits the broker's work for one user.",
        unit="whole number, 1 at least",
        default="256",
        example="max_sessions_per_user = 50",
        read=read_count,
    )
    priority_classes = _option(
        Dict(default_value=dict(_POOL.priority_classes)),
        "Priority classes by name. The higher number goes first in the queue.",
        unit="dict of name to whole number",
        default="{'interactive': 200, 'notebook': 100, 'batch': 0}",
        example='priority_classes = {"urgent": 500, "notebook": 100}',
        read=read_priority_classes,
    )
    default_priority = _option(
        Unicode(_POOL.default_priority),
        "Priority class of a kernel that asks for no class.",
        unit="name in priority_classes",
        default="'notebook'",
        example='default_priority = "interactive"',
    )
    classes_allowed = _option(
        List(Unicode(), default_value=None, allow_none=True),
        "Priority classes whose kernels may have a slice. This option is mostly useful in "
        "schedules, for example to run batch work only at night. The pool suspends kernels of "
        "other classes, if necessary during a cell. They lose nothing, and continue when their "
        "class is allowed again.",
        unit="list of names in priority_classes",
        default="None (all)",
        example='classes_allowed = ["interactive", "notebook"]',
        read=lambda value: None if value is None else frozenset(value),
    )
    idle_timeout = _option(
        Seconds(_POOL.idle_timeout),
        "If a kernel does not use its slice for this long, the slice goes back to the pool. Under "
        "'lazy', GPU work counts as use. Under 'cell' and 'manual', a running cell counts as use.",
        unit="seconds, or text such as '10m'",
        default="300",
        example="idle_timeout = 600",
    )
    quiet_after = _option(
        Seconds(1.0),
        "Under 'lazy', a kernel counts as not using its GPU if it has made no CUDA call for this "
        "long and none is running, even while its cell runs. If another kernel waits, the slice "
        "counts as unused as soon as the cell ends.",
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
    max_keep = _option(
        Seconds(_POOL.max_keep, zero=True),
        "A user may keep an idle slice (%gpu keep) at most this long at a time.",
        unit="seconds, or text such as '4h'",
        default="14400 (4 h); 0: nobody keeps an idle slice",
        example='max_keep = "1h"',
    )
    reserve = _option(
        Size(_POOL.reserve, zero=True),
        "Memory of each GPU that the pool never grants, so that programs outside the pool can use "
        "it.",
        unit="bytes, or text such as '512MiB'",
        default="0",
        example='reserve = "512MiB"',
    )
    host_memory = _option(
        AnyTrait("50%"),
        "Host memory that all suspended kernels together may take. A percentage refers to the "
        "machine's memory, or to the broker's cgroup limit if that is less.",
        unit="bytes, text such as '64GiB', or per cent such as '50%'",
        default="'50%'",
        example='host_memory = "64GiB"',
        read=lambda value: read_host_memory(value, 1 << 40),
    )
    host_reserve = _option(
        AnyTrait("10%"),
        "Each suspend leaves this much host memory free, both in the machine and in each control "
        "group (cgroup) above the kernel. A percentage is a part of the memory limit of the "
        "machine or of the control group, but at least 1 GiB, or a quarter of that limit if this "
        "is less. A size counts for a control group as at most a quarter of its limit. If less "
        "memory is free while kernels are suspended, the broker moves the largest suspended state "
        "that fits back to a GPU, and warns the kernel's user.",
        unit="bytes, text such as '4GiB', or per cent such as '10%'; 0 for none",
        default="'10%'",
        example='host_reserve = "8GiB"',
        read=read_host_reserve,
    )
    resume_headroom = _option(
        Size(_POOL.resume_headroom, zero=True),
        "Before the pool resumes a suspended kernel, this much device memory (at most a sixteenth "
        "of the GPU) must be free in addition to the kernel's own memory. A resume may need more "
        "memory than the suspend freed, and a resume without room can kill the process. The extra "
        "memory goes back to the pool once the kernel is resumed.",
        unit="bytes, or text such as '512MiB'",
        default="256 MiB",
        example='resume_headroom = "512MiB"',
    )
    max_swap_overhead = _option(
        Share(_POOL.max_swap_overhead, zero=True),
        "While kernels compete for a GPU, moving their state may take at most this part of the "
        "time. So a kernel with short pauses keeps its slice until the move of its state takes "
        "only this part of the time for which the kernel has used its GPU. While another kernel "
        "waits, an idle kernel keeps its slice at most as long as the move takes. 0: a waiting "
        "kernel gets an idle slice at once, even if the move takes long.",
        unit="number from 0 to below 1, or per cent such as '10%'",
        default="0.1",
        example="max_swap_overhead = 0.05",
    )
    retest_after = _option(
        Seconds(60.0, zero=True),
        "If a failure (an Xid, a self-test) has taken a GPU out of service, the broker tests the "
        "GPU again after this time. The time doubles after each failed test, up to an hour. A GPU "
        "that passes is in service again. 0: the broker tests only on `jupyter gpupool doctor "
        "--retest`.",
        unit="seconds, or text such as '5m'",
        default="60",
        example='retest_after = "5m"',
    )
    turn = _option(
        Seconds(0.1, least=MIN_TURN),
        "Kernels that share a GPU and compute at the same time take turns if one of them has asked "
        "for a part of the compute time (compute). This is the length of one turn.",
        unit="seconds, 0.01 at least",
        default="0.1",
        example="turn = 0.25",
    )
    managed_memory = _choice(
        ManagedPolicy,
        "What the guard does when a kernel calls cudaMallocManaged. The driver cannot suspend a "
        "process that has such memory, and a slice does not limit the memory. 'refuse' returns an "
        "error (CUDA_ERROR_NOT_SUPPORTED). 'allow' counts the memory, and the kernel then keeps "
        "its slice.",
        example='managed_memory = "allow"',
    )
    overuse = _choice(
        OverusePolicy,
        "What the pool does about a kernel that holds more device memory than it was granted, "
        "which can happen only without the guard or if a program goes around it: 'report' logs "
        "it and shows it in the status, 'end' ends the kernel.",
        example='overuse = "end"',
        trait=_Overuse,
    )
    foreign_processes = _choice(
        ForeignPolicy,
        "Processes on a pool GPU that do not belong to the pool: 'count' subtracts their memory "
        "from the pool's, 'report' also logs each one, 'end' also ends the processes of users who "
        "have a kernel in the pool.",
        example='foreign_processes = "report"',
    )
    socket = _option(
        Unicode(""),
        "Path of the broker's unix socket, at most 107 bytes.",
        unit="absolute path",
        default="'' ($GPUPOOL_SOCKET, else /run/gpupool/broker.sock if it is there, else per user)",
        example='socket = "/run/gpupool/broker.sock"',
        read=read_socket,
        restart=True,
    )
    device_python = _option(
        Unicode(""),
        "The Python that runs the broker's device processes: its environment has NVIDIA's packages "
        "(cuda-core, cuda-bindings, nvidia-ml-py), which no other part of the pool needs. "
        "`jupyter gpupool install-devices` makes an environment that the broker finds without "
        "this option.",
        unit="absolute path",
        default="'' (the Python of install-devices, else the broker's own Python)",
        example='device_python = "/opt/gpupool/devices/bin/python"',
        read=read_program,
        restart=True,
    )
    state_dir = _option(
        Unicode(""),
        "Folder of the broker's journal; each machine has its own journal. If the folder is on a "
        "network file system (NFS, SMB, Lustre, FUSE and the like), where a journal is not safe, "
        "the broker uses /var/tmp/gpupool-UID instead, and reports this in its log and in `jupyter "
        "gpupool doctor`.",
        unit="absolute path",
        default="'' (root: /var/lib/gpupool; others: ~/.local/state/gpupool)",
        example='state_dir = "/var/lib/gpupool"',
        read=read_folder,
        restart=True,
    )
    journal_size = _option(
        Size(256 << 20, least=1 << 20),
        "Disk space of the journal, from which reports and timelines are made. The broker drops "
        "the oldest rows beyond this size, and beyond 500,000 rows. The journal's write-ahead log "
        "takes about 16 MiB more.",
        unit="bytes, or text such as '1GiB'; 1 MiB at least",
        default="256 MiB",
        example='journal_size = "1GiB"',
    )
    sample_interval = _option(
        Seconds(1.0),
        "How often the broker reads device and host memory.",
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
        restart=True,
    )
    linger = _option(
        Seconds(30.0, zero=True),
        "A broker that was started for one user ends this long after its last kernel has ended.",
        unit="seconds, or text such as '5m'",
        default="30",
        example='linger = "5m"',
    )
    metrics_port = _option(
        Int(0),
        "Serve metrics of the whole pool for Prometheus at this port of 127.0.0.1: "
        "http://127.0.0.1:PORT/metrics. Other machines cannot read these metrics. Every user of "
        "this machine can; the metrics name no person.",
        unit="TCP port, 1 to 65535",
        default="0 (not served)",
        example="metrics_port = 9845",
        read=read_port,
    )
    user_sockets = _option(
        Bool(False),
        "Serve kernels in containers. Root, Docker or the kubelet makes a folder users/NAME for "
        "each user beside the machine's socket, and the broker makes a socket in each of these "
        "folders. Processes in a container that has such a folder count as processes of the user "
        "NAME. Only the machine's broker has these sockets.",
        unit="True or False",
        default="False",
        example="user_sockets = True",
        restart=True,
    )
    admins = _option(
        List(Unicode()),
        "These users may see every kernel, take its slice back, change its class and end it. They "
        "may also take GPUs out of service. Root and the broker's own user always have these "
        "rights.",
        unit="list of user names",
        default="[]",
        example='admins = ["ada"]',
        read=tuple,
    )

    @validate(*[name for name, trait in vars().items() if _reader(trait)])
    def _check_one(self, proposal: Mapping[str, Any]) -> Any:
        # Refuse a value that the option's reader refuses. Return the admin's value unchanged, and
        # not the result of the reader, because ``settings`` calls the reader again later.
        try:
            proposal["trait"].metadata["read"](proposal["value"])
        except ValueError as error:
            raise TraitError(str(error)) from error
        return proposal["value"]

    def settings(
        self, *, host_total: int | None = None, environ: Mapping[str, str] | None = None
    ) -> BrokerSettings:
        """Return the settings of the broker.

        Parameters
        ----------
        host_total:
            Bytes of host memory, for values in per cent; None means the memory of this machine.
        environ:
            The environment that may have ``GPUPOOL_EMULATE``; None means ``os.environ``.

        Raises
        ------
        ConfigError
            If valid values contradict each other.
        """
        total = Host().total() if host_total is None else host_total
        faults: list[Fault] = []
        values = {name: self._read(name) for name in self.class_traits(config=True)}
        self._check_sizes(faults)
        values["host_memory"] = read_host_memory(self.host_memory, total)
        values["emulate"] = self._machine(os.environ if environ is None else environ, faults)
        self._check_priority(values["priority_classes"], faults)
        faults += check_groups(values["groups"])
        faults += self._check_hub(values["groups"].members)
        faults += self._check_cluster(values["groups"].tree)
        if faults:
            raise WrongConfiguration(faults)
        values["half_life"] = values.pop("fair_share_half_life")
        groups = values.pop("groups")
        values["groups"], values["members"] = groups.tree, groups.members
        pool = {f.name: values.pop(f.name) for f in fields(PoolSettings) if f.name in values}
        notes = []
        if pool["host_memory"] > total:
            notes.append(
                f"c.GPUPool.host_memory is {format_bytes(pool['host_memory'])}, but this machine "
                f"has {format_bytes(total)}. The pool starts a suspend only if the kernel's state "
                "fits into host memory."
            )
        return BrokerSettings(pool=PoolSettings(**pool), notes=tuple(notes), **values)

    def chosen(self) -> dict[str, Any]:
        """Return the options that are not at their defaults: by name, the value as a JSON value."""
        found = {}
        for name, trait in self.class_traits(config=True).items():
            value = getattr(self, name)
            if value != trait.default():
                found[name] = json.loads(json.dumps(value, default=_plain))
        return found

    def _read(self, name: str) -> Any:
        """Return the value of an option as the broker uses it."""
        value, reader = getattr(self, name), _reader(self.class_traits()[name])
        return reader(value) if reader else value

    def _check_hub(self, members: Mapping[str, Members]) -> Iterator[Fault]:
        for name, rule in members.items():
            if rule.hub_groups and self.hub_groups is None:
                text = "The pool knows no members of Hub groups: c.GPUPool.hub_groups is not set."
                step = "Set c.GPUPool.hub_groups to a function, or remove these groups."
                yield Fault(text, step, "groups", (name, "hub_groups"))

    def _check_cluster(self, groups: Mapping[str, Group]) -> Iterator[Fault]:
        """Yield a fault for each cap whose size would differ between the machines of a cluster."""
        for name, group in groups.items() if self.cluster_nodes else ():
            if group.cap is not None and group.cap.bytes is None:
                text = "A cap that all machines of a cluster share must be a size."
                yield Fault(text, "Write a size such as '80GiB'.", "groups", (name, "cap"))

    def _check_priority(self, classes: Mapping[str, int], faults: list[Fault]) -> None:
        if self.default_priority not in classes:
            hint = did_you_mean(
                self.default_priority, classes, then=f"Allowed are {one_of(classes)}."
            )
            text = f"{self.default_priority!r} is not a priority class."
            faults.append(Fault(text, hint, "default_priority"))
        for index, name in enumerate(self.classes_allowed or ()):
            if name not in classes:
                hint = did_you_mean(name, classes, then=f"Allowed are {one_of(classes)}.")
                text = f"{name!r} is not a priority class."
                faults.append(Fault(text, hint, "classes_allowed", (index,)))

    def _check_sizes(self, faults: list[Fault]) -> None:
        """Add a fault if ``default_memory`` or ``default_limit`` is too large or too small.

        Neither may be above ``max_memory_per_kernel``, and the limit may not be below the memory.
        If ``default_limit`` is None, it needs no check: each kernel's limit is at most
        ``max_memory_per_kernel``.
        """
        memory, limit, most = self.default_memory, self.default_limit, self.max_memory_per_kernel
        if limit is not None and limit < memory:
            faults.append(
                Fault(
                    f"{format_bytes(limit)} is below default_memory ({format_bytes(memory)}).",
                    "Raise default_limit or lower default_memory.",
                    "default_limit",
                )
            )
        for name, value in (("default_memory", memory), ("default_limit", limit)):
            if most is not None and value is not None and value > most:
                faults.append(
                    Fault(
                        f"{format_bytes(value)} is above max_memory_per_kernel "
                        f"({format_bytes(most)}).",
                        f"Lower {name} or raise max_memory_per_kernel.",
                        name,
                    )
                )
                break

    def _machine(self, environ: Mapping[str, str], faults: list[Fault]) -> str:
        if self.emulate or "emulate" in self.config.get("GPUPool", {}):
            text, option = self.emulate, "emulate"
        else:
            text, option = environ.get(EMULATE_VARIABLE, ""), ""
        if text:
            wrong = wrong_machine(text)
            if wrong:
                where = "" if option else f"{EMULATE_VARIABLE}: "
                faults.append(Fault(f"{where}{wrong}", option=option))
        return text


def _plain(value: Any) -> str:
    """Return a text in place of a value that JSON cannot represent.

    For a function the text has the function's name, so the text is the same in every process.
    """
    return f"function {value.__qualname__}" if hasattr(value, "__qualname__") else str(value)


def needs_restart(old: BrokerSettings, new: BrokerSettings) -> tuple[str, ...]:
    """Return the options that differ between ``old`` and ``new`` and need a broker's restart."""
    return tuple(name for name in fixed_options() if getattr(old, name) != getattr(new, name))


def fixed_options() -> list[str]:
    """Return the options whose old value a running broker keeps."""
    traits = GPUPool.class_traits(config=True)
    return [name for name in vars(GPUPool) if name in traits and traits[name].metadata["restart"]]
