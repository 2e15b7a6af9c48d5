# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Which nodes wait for which key, and in which order. Pure.

In the queue of every key, the nodes are in the order in which they began to wait. So two nodes have
the same order in all queues.
"""

from __future__ import annotations

from typing import Callable, Iterable, Iterator, Mapping

from .messages import Key


class Queues:
    """A queue for each key: the nodes that wait for the key, the longest wait first.

    Parameters
    ----------
    is_silent:
        Returns whether a node has not reported for too long. Such a node no longer waits.
    """

    def __init__(self, is_silent: Callable[[str], bool]) -> None:
        self._is_silent = is_silent
        #: By key: what each node needs.
        self._needs: dict[Key, dict[str, int]] = {}
        #: The keys that each node waits for.
        self._waiting: dict[str, Mapping[Key, int]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._waiting

    def of(self, name: str) -> Mapping[Key, int]:
        """Return what a node waits for."""
        return self._waiting.get(name, {})

    def put(self, name: str, needs: Mapping[Key, int]) -> None:
        """Set what a node waits for; {} means nothing.

        If the node waits for the same keys as before, it keeps its place in their queues.
        """
        if needs.keys() != self.of(name).keys():
            self.drop(name)
        if needs:
            self._waiting[name] = needs
            for key, need in needs.items():
                self._needs.setdefault(key, {})[name] = need

    def drop(self, name: str) -> list[Key]:
        """Remove a node from all queues; return the keys that it waited for."""
        keys = [*self._waiting.pop(name, ())]
        for key in keys:
            self._needs[key].pop(name, None)
            if not self._needs[key]:
                del self._needs[key]
        return keys

    def wanted(self, keys: Iterable[Key], but: str) -> frozenset[Key]:
        """Return each of ``keys`` for which a node other than ``but`` waits."""
        found = []
        for key in keys:
            queue = self._needs.get(key)
            if queue and (len(queue) > 1 or but not in queue):
                found.append(key)
        return frozenset(found)

    def before(self, key: Key, name: str, most: int) -> int:
        """Return how much is reserved for nodes that have waited for longer than ``name``.

        The result is at most ``most``. When the sum reaches ``most``, the function stops, because a
        queue may be long and the free amount small.
        """
        if key not in self._needs:
            return 0
        found = 0
        for other, need in self._walk(key):
            if other == name or found >= most:
                break
            found += need
        return min(found, most)

    def reached(self, key: Key, free: int) -> Iterator[str]:
        """Yield the nodes of a queue that can get a part of the free amount ``free``."""
        for name, need in self._walk(key):
            if free <= 0:
                return
            yield name
            free -= need

    def _walk(self, key: Key) -> Iterator[tuple[str, int]]:
        """Yield each node that waits for a key, and how much it needs; drop silent nodes."""
        for name, need in [*self._needs.get(key, {}).items()]:
            if self._is_silent(name):
                self.drop(name)
            else:
                yield name, need
