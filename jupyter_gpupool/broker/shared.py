# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tracks how much of the cluster's shared limits this broker may grant.

The agent of the cluster carries reports to the ledger, and brings the ledger's answers back. The
ledger lends this machine a part of each limit. The pool counts the rest of the limit as in use on
other machines. A grant within the lent parts needs no message. A grant beyond the lent parts waits,
even if no agent has ever connected.

The order matters: the pool must learn of a smaller ceiling before the ledger does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ..cluster.budgets import Budgets
from ..cluster.messages import (
    Epoch,
    Usages,
    epoch_from_json,
    loan_from_json,
    parts_from_json,
    parts_to_json,
    report_to_json,
)
from ..cluster.overlay import overlay, usage_of, windows
from ..errors import Code, RefusedError
from ..pool import events as e
from ..pool.model import Owner, PoolSettings
from ..protocol import Message
from .cluster_views import ClusterViews, View, keys_for, of_user, summary_of, visible
from .configuration import Configuration
from .core import Clock, Core
from .demand import demands_of
from .gpu.maintenance import Maintenance
from .sessions import LiveSessions
from .store.journal import Journal
from .transport.auth import owner_of
from .transport.connection import Connection

#: Seconds from a change to its report. A grant causes several changes, and one report then contains
#: all of them.
SOON = 0.01
#: LEAST: the least number of seconds between two reports. LONGEST: the most seconds that a request
#: for a report may wait.
LEAST, LONGEST = 0.05, 60.0
#: The most passes in which the broker applies changed budgets before a report. A pass never takes
#: back what an earlier pass has granted.
ROUNDS = 8

#: If there are daily budgets: seconds between two checks of the GPU-seconds that sessions use.
LOOK = 15.0

#: Seconds between two reports of what users and groups have used. Fair shares compare the usage of
#: hours, so a report every TELL seconds is enough. If the owner of a session was not in the last of
#: these reports, the next one may follow after LEAST_TELL seconds.
TELL, LEAST_TELL = 30.0, 1.0

#: Keys in the journal's metadata. LIFE: a number for the ledger, which grows with each start of a
#: broker. DRAINS: "1" while this machine drains and leaves the cluster.
LIFE, DRAINS = "cluster-life", "cluster-drains"
#: The journal's key for the GPU-seconds and guarantees that the ledger has lent to this machine. A
#: restarted broker uses them until the ledger answers. Without them, the restarted broker would
#: have to suspend sessions.
PARTS = "cluster-parts"
#: The journal's key for the fencing token of the ledger that this machine obeys, as JSON. Without
#: this token, a restarted broker could obey an earlier ledger, which does not know what a later
#: ledger has lent.
TOKEN = "cluster-token"
#: The journal's key for the journal's own name. If the journal is lost, the next journal has a new
#: name. The new name shows the ledger that this broker does not know what its sessions have used
#: before.
JOURNAL = "cluster-journal"

#: The reason that the pool shows for drained GPUs while this machine leaves the cluster.
LEAVES = "this machine leaves the cluster"


def token_from(text: str) -> Epoch:
    """Return the fencing token in ``text``; the lowest token if ``text`` is not readable."""
    try:
        return epoch_from_json(json.loads(text)) if text else Epoch()
    except ValueError:
        return Epoch()


class LentLimits:
    """Gives the pool its rules, which contain the limits that the ledger has lent this machine.

    The rest of each shared limit counts as used by other machines.
    """

    def __init__(
        self,
        configuration: Configuration,
        journal: Journal,
        sessions: LiveSessions,
        clock: Clock,
    ) -> None:
        settings = configuration.settings
        # The ledger ignores a broker whose number is smaller than the number of the previous
        # broker. The journal keeps the previous number. The new number is also at least the time of
        # day in milliseconds, because the journal may be lost.
        life = max(int(journal.meta(LIFE) or 0) + 1, int(1000 * time.time()))
        journal.remember(LIFE, str(life))
        name = journal.meta(JOURNAL) or secrets.token_hex(8)
        journal.remember(JOURNAL, name)
        self._sessions = sessions
        #: Returns the pool's time of day, which decides the window of each daily budget.
        self.time_of_day = clock.time_of_day
        share = {"memory": settings.cluster_min_share, "devices": 1, "leases": 1}
        self.budgets = Budgets(
            settings.cluster_node or socket.gethostname(), life,
            on_loss=settings.on_ledger_loss, share=share, drains=journal.meta(DRAINS) == "1",
            ceilings=parts_from_json(journal.meta(PARTS)),
            epoch=token_from(journal.meta(TOKEN)), journal=name,
        )  # fmt: skip
        self._remember = journal.remember
        self._written = self.budgets.parts(), self.budgets.epoch

    def remember(self) -> bool:
        """Pass changed parts or a changed token to the journal; return whether any has changed.

        The next commit writes them. The caller must commit before the next report. With this
        report, the machine gives parts back, and the ledger may then lend these parts to other
        machines.
        """
        now = parts, epoch = self.budgets.parts(), self.budgets.epoch
        if now == self._written:
            return False
        self._written = now
        self._remember(PARTS, parts_to_json(parts))
        self._remember(TOKEN, json.dumps(epoch))
        return True

    def limits(self, settings: PoolSettings) -> PoolSettings:
        """Return ``settings`` as the pool of this machine must see them now.

        The part of a shared limit that this machine may not use counts as used by other machines.
        """
        now, budgets = time.monotonic(), self.budgets
        # Include users who have no session now: a user's part may still contain the GPU-seconds
        # that earlier sessions of the user have used on this machine.
        known = {key.name for key in budgets.ceilings if key.kind == "user"}
        owners = sorted({s.owner.name for s in self._sessions} | known)
        return overlay(
            settings, owners, lambda key: budgets.most(key, now),
            connected=budgets.is_connected(now), drains=budgets.drains,
            now=self.time_of_day(), used_up=budgets.used_up,
        )  # fmt: skip


class SharedLimits:
    """Passes changes between the pool and :class:`LentLimits`, and answers the cluster's agent.

    Parameters
    ----------
    maintenance:
        Takes the GPUs out of service when this machine leaves.
    """

    def __init__(
        self,
        core: Core,
        lent: LentLimits,
        maintenance: Maintenance,
        configuration: Configuration,
        log: logging.Logger,
    ) -> None:
        self._core = core
        self._lent = lent
        self._budgets = lent.budgets
        self._maintenance = maintenance
        self._configuration = configuration
        self._log = log
        self._pending: tuple[Connection, int | None] | None = None
        self._timeout: asyncio.TimerHandle | None = None
        self._soon: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._window: asyncio.TimerHandle | None = None
        self._reported = 0.0
        self._told_usage = -math.inf
        self._told_of: set[Owner] = set()
        self._connected = False
        self._inside = False
        self._views = ClusterViews(self._ask_for_view)

    # ------------------------------------------------------------------ for the pool

    def changed(self) -> None:
        """Note that what a session has, or what it waits for, may have changed."""
        if self._soon is None and not self._inside:
            self._soon = asyncio.get_running_loop().call_later(SOON, self._look)

    def _look(self) -> None:
        self._soon = None
        self._settle()
        self._report_if_due()

    def _settle(self) -> None:
        """Tell the budgets what is in use, and the pool its limits, until nothing changes."""
        core = self._core
        self._inside = True
        try:
            for _ in range(ROUNDS):
                self._look_at_sessions()
                settings = self._lent.limits(self._configuration.settings.pool)
                if settings == core.pool.settings:
                    break
                core.handle(e.SettingsChanged(now=core.now(), settings=settings))
        finally:
            self._inside = False
        self._watch_expiry()
        self._watch_window()

    def _watch_window(self) -> None:
        """Set a timer for the next check of the daily budgets, if there are daily budgets.

        The check comes after LOOK seconds, or just after the next window of a budget begins if that
        is earlier.
        """
        if self._window is not None:
            self._window.cancel()
            self._window = None
        now = self._lent.time_of_day()
        if found := windows(self._configuration.settings.pool, now):
            wait = min(LOOK, found[1] - now + SOON)
            self._window = asyncio.get_running_loop().call_later(wait, self._look)

    def _watch_expiry(self) -> None:
        """Log if the ledger is lost or answers again.

        While the ledger answers, set a timer. If the ledger then does not answer in time, the timer
        applies the rule for a lost ledger.
        """
        now, until = time.monotonic(), self._budgets.until
        connected = now < until
        if connected != self._connected:
            self._connected = connected
            text = "The cluster's ledger answers" if connected else (
                "The cluster's ledger does not answer: the rule c.GPUPool.on_ledger_loss applies"
            )  # fmt: skip
            self._log.log(logging.INFO if connected else logging.WARNING, "%s", text)
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if connected:
            loop = asyncio.get_running_loop()
            self._expiry = loop.call_later(until - now + 0.001, self._settle)

    # ------------------------------------------------------------------ what sessions use

    def _look_at_sessions(self) -> None:
        rules, now = self._configuration.settings.pool, self._lent.time_of_day()
        found = demands_of(self._core, rules, self._budgets, now)
        self._budgets.use(found.uses, found.waits, is_empty=found.is_empty)

    # ------------------------------------------------------------------ the agent

    def account(self, connection: Connection, message: Message) -> None:
        """Answer with a report as soon as one is due, at the latest after the agent's ``wait``."""
        self.check_agent(connection)
        if self._pending is not None and self._pending[0] is not connection:
            other, request = self._pending
            other.refuse(request, RefusedError(
                "Another agent of the cluster has connected.", code=Code.BAD_REQUEST,
            ))  # fmt: skip
        self._forget_pending()
        wait = min(max(float(message.get("wait", 0.0)), 0.0), LONGEST)
        self._pending = connection, message.get("id")
        self._timeout = asyncio.get_running_loop().call_later(wait, self._report)
        self._look()

    def lend(self, connection: Connection, message: Message) -> None:
        """Apply an answer of the ledger."""
        self.check_agent(connection)
        try:
            values = json.loads(message["answer"])
            if "view" in values:
                self._views.arrived(values["view"])
                connection.answer(message.get("id"))
                return
            answer = loan_from_json(values)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise RefusedError(
                f"This is no answer of a ledger: {type(error).__name__}.", code=Code.BAD_REQUEST
            ) from None
        # First tell the budgets what sessions use now. Otherwise the ledger's answer could set a
        # ceiling below this use.
        self._look_at_sessions()
        before = self._budgets.drains
        self._budgets.answered(answer)
        if answer.elsewhere is not None:
            self._used_elsewhere(answer.elsewhere)
        if self._lent.remember():
            self._core.commit()
        if self._budgets.drains != before:
            self._drains_now("the cluster")
        self._settle()
        connection.answer(message.get("id"))
        self._report_if_due()

    def _used_elsewhere(self, usages: Usages) -> None:
        kinds: dict[str, dict[str, float]] = {"user": {}, "group": {}}
        for (kind, name), amount in usages.items():
            kinds[kind][name] = amount
        core = self._core
        core.handle(e.UsedElsewhere(now=core.now(), users=kinds["user"], groups=kinds["group"]))

    def cluster(self, connection: Connection, message: Message) -> None:
        """Answer with the ledger's view of all machines, and a summary of this machine."""
        request = message.get("id")
        self.look(
            connection, request,
            lambda view: connection.answer(request, self._shown(connection, view)),
        )  # fmt: skip

    def look(
        self, connection: Connection, request: int | None, give: Callable[[View | None], None]
    ) -> None:
        """Call ``give`` with the ledger's view of all machines, or with None if no answer comes."""
        connected = self._budgets.is_connected(time.monotonic())
        self._views.look(connection, request, give, connected=connected)

    def _ask_for_view(self) -> None:
        self._budgets.hurry()
        self._report_if_due()

    def _shown(self, connection: Connection, view: Mapping[str, Any] | None) -> dict[str, Any]:
        core, peer = self._core, connection.peer
        user, keys = owner_of(peer.uid).name, None
        own: Mapping[str, Any] | None = summary_of(
            core, self._configuration.settings.cluster_data
        )._asdict()
        if not self._configuration.access.is_admin(peer):
            keys = keys_for(user, core, self._configuration.settings.pool)
            own = of_user(own, user)
        now = time.monotonic()
        return {
            "name": self._budgets.node,
            "view": visible(view, user, keys),
            "own": own,
            "connected": self._budgets.is_connected(now),
            # Seconds since the last report that the ledger has answered.
            "age": self._budgets.age(now),
        }

    def leave(self, connection: Connection, message: Message) -> None:
        """Drain this machine, so that it leaves the cluster; answer with the state of the drain."""
        peer = connection.peer
        if not self._configuration.access.is_admin(peer):
            raise RefusedError(
                "Only an admin of this machine may take it out of its cluster.",
                code=Code.NOT_ALLOWED,
                next_step="Ask root, or one of c.GPUPool.admins.",
            )
        if not self._budgets.drains:
            # This machine keeps its parts of budgets until they are used up or another day begins.
            self._budgets.drain(True)
            self._drains_now(owner_of(peer.uid).name)
        self._settle()
        self._report_if_due()
        connection.answer(message.get("id"), {
            "name": self._budgets.node,
            "left": self._budgets.has_left,
            "kernels": len(self._core.pool.leases()),
            "connected": self._budgets.is_connected(time.monotonic()),
        })  # fmt: skip

    def _drains_now(self, by: str) -> None:
        """Drain the GPUs of this machine, or put them back into service."""
        drains = self._budgets.drains
        self._core.journal.remember(DRAINS, "1" if drains else "")
        if drains:
            self._log.warning(
                "By order of %s, this machine drains its GPUs and leaves the cluster", by
            )
            self._maintenance.drain_all(LEAVES, by)
        else:
            self._log.warning("This machine is back in the cluster")
            self._maintenance.undrain(LEAVES)
        self._core.commit()

    def gone(self, connection: Connection) -> None:
        """Forget the requests of a connection that has ended."""
        self._views.gone(connection)
        if self._pending is not None and self._pending[0] is connection:
            self._forget_pending()

    def close(self) -> None:
        """Stop: cancel the timers and the agent's request."""
        self._forget_pending()
        self._views.close()
        for timer in (self._soon, self._expiry, self._window):
            if timer is not None:
                timer.cancel()

    def check_agent(self, connection: Connection) -> None:
        """Refuse a peer that is not the cluster's agent."""
        access, settings = self._configuration.access, self._configuration.settings
        peer = connection.peer
        if access.is_admin(peer) or owner_of(peer.uid) == Owner(settings.cluster_agent):
            return
        raise RefusedError(
            f"Only the user {settings.cluster_agent} may lend limits to this machine.",
            code=Code.NOT_ALLOWED,
            next_step="Run the agent as that user, or name another one in c.GPUPool.cluster_agent.",
        )

    def _report_if_due(self) -> None:
        """Report at once if a report is due, but keep :data:`LEAST` seconds between two reports."""
        if self._pending is None or not self._budgets.due:
            return
        wait = self._reported + LEAST - time.monotonic()
        if wait <= 0:
            self._report()
        elif self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(wait, self._look)

    def _report(self) -> None:
        if self._pending is None:
            return
        self._settle()
        (connection, request), now = self._pending, time.monotonic()
        self._forget_pending()
        self._reported = now
        summary = summary_of(self._core, self._configuration.settings.cluster_data)
        found = self._budgets.report(now)
        if self._lent.remember():
            self._core.commit()  # the journal must forget a part before the report gives it back
        report = replace(found, summary=summary, looks=self._views.wanted)
        rules = self._configuration.settings.pool
        owners = {session.owner for session in self._core.sessions}
        wait = TELL if owners <= self._told_of else LEAST_TELL
        if rules.half_life > 0 and now >= self._told_usage + wait:
            self._told_usage, self._told_of = now, owners
            usage = usage_of(rules, self._core.pool.usage(self._core.now()), owners)
            report = replace(report, usage=usage, half_life=rules.half_life)
        text = json.dumps(report_to_json(report), separators=(",", ":"))
        connection.answer(request, {"report": text})

    def _forget_pending(self) -> None:
        self._pending = None
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
