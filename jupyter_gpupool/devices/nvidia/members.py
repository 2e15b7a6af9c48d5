# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The processes of a session, and whether each may have a CUDA context. Runs in a worker child.

A suspend holds the lock of the process's address space. So a read of ``/proc/PID/environ`` or
``/proc/PID/maps`` can block during the suspend.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...procfs import (
    PROC,
    Presence,
    ProcessId,
    Stat,
    all_stats,
    apart,
    owner,
    presence,
    session_of,
)

#: A part of the path of every mapped guard, also in a container. Symbolic links in other folders
#: lead to the guard's file. If a process loads the guard through a link, ``/proc/PID/maps`` shows
#: the path of the file, not the path of the link.
_GUARD = b"/jupyter_gpupool/guard/lib/"


@dataclass(frozen=True, slots=True)
class Member:
    """One process of a session."""

    process: ProcessId
    presence: Presence
    #: Whether the CUDA driver library is mapped; None if the process's map cannot be read. A
    #: process without the library has no context. If the library is mapped, only the driver knows
    #: whether there is a context.
    libcuda: bool | None


def maps_libcuda(pid: int) -> bool | None:
    """Return whether the process has mapped the CUDA driver library; None if this is unreadable.

    The guard does not count as the driver library, although its file has the same name. It is
    mapped into every shell of a session, but it loads the driver only when the process calls it.
    """
    try:
        with open(PROC / str(pid) / "maps", "rb") as maps:
            return any(b"/libcuda.so" in line and _GUARD not in line for line in maps)
    except OSError:
        return None


def _depth(stat: Stat, stats: dict[int, Stat], root: int) -> int | None:
    """Return how many generations below ``root`` a process is; None if it is no descendant."""
    depth, pid, seen = 0, stat.pid, {stat.pid}
    while pid != root:
        above = stats.get(pid)
        if above is None or above.parent in seen:
            return None
        pid, depth = above.parent, depth + 1
        seen.add(pid)
    return depth


def _passes(stat: Stat, stats: dict[int, Stat], broker: int, root: int) -> bool:
    """Return whether ``broker`` is the process itself or one of its ancestors below ``root``.

    The search begins at the process, goes up from parent to parent, and ends at ``root``.
    """
    pid, seen = stat.pid, set[int]()
    while pid not in seen and pid != root:
        if pid == broker:
            return True
        seen.add(pid)
        above = stats.get(pid)
        if above is None:
            return False
        pid = above.parent
    return False


def session_members(root: ProcessId, session: str, broker: int = 0) -> list[Member]:
    """Return the live processes of a session, children before their parents, ``root`` last.

    - The list has ``root`` and its descendants. A descendant whose environment names another
      session is not in the list, because a notebook may start a second pooled kernel.
    - The list also has processes of the same user whose environment names ``session``. Such a
      process is no descendant any more if its parent has ended, or if it went to the background.
    - The list is empty if ``root`` has ended.

    A notebook may start the broker, and the broker may adopt orphans of the notebook. So ``broker``
    never belongs to a session, and a descendant of the broker belongs to the session only if the
    descendant's environment names the session.
    """
    # Without this check, each process of the user without GPUPOOL_SESSION would be a member.
    if not session:
        raise ValueError("A session must have a name.")
    stats = all_stats()
    top = stats.get(root.pid)
    if top is None or top.start_time != root.start_time:
        return []
    user = owner(root.pid)
    found: list[tuple[int, int, Stat]] = []
    for stat in stats.values():
        depth = _depth(stat, stats, root.pid)
        if stat.pid == root.pid:
            found.append((0, stat.start_time, stat))
            continue
        # The environment of a process that is no descendant may name the session. Ignore a process
        # of another user, because any user may name any session. Also ignore a process that is
        # older than the root, because the root cannot have started it.
        if depth is None and (stat.start_time < root.start_time or owner(stat.pid) != user):
            continue
        beside = depth is None and stat.pid != broker
        if broker and not beside and _passes(stat, stats, broker, root.pid):
            continue
        named = session_of(stat.pid)
        # A process in another container may have the same user id, but belong to another user.
        if depth is None and named == session and apart(stat.pid, root.pid):
            continue
        if named == session or (depth is not None and not named):
            # An orphan's place in the tree is unknown: any other process in the list may be the
            # orphan's ancestor. So an orphan counts as deeper than all descendants of the root, and
            # comes before the descendants in the list.
            found.append((1 << 20 if depth is None else depth, stat.start_time, stat))
    found.sort(key=lambda item: item[:2], reverse=True)
    return [Member(stat.identity, stat.presence, maps_libcuda(stat.pid)) for *_, stat in found]


def look_again(members: list[Member]) -> list[Member]:
    """Return the processes in ``members`` that still live, with their state now."""
    now = [(member.process, presence(member.process)) for member in members]
    return [Member(p, there, maps_libcuda(p.pid)) for p, there in now if there != "gone"]
