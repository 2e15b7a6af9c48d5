# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The order of requests, the budgets of users, and the bounds on unread bytes."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket

import pytest

from jupyter_gpupool.broker.ratelimit import TokenBucket
from jupyter_gpupool.broker.request_fields import REQUESTS
from jupyter_gpupool.broker.transport import connection as module
from jupyter_gpupool.broker.transport import dispatch
from jupyter_gpupool.broker.transport.auth import Peer
from jupyter_gpupool.broker.transport.connection import Connection, Counters
from jupyter_gpupool.broker.transport.dispatch import PRICES, Dispatcher
from jupyter_gpupool.protocol import MAX_REQUEST

#: User ids; a test chooses the user of each connection.
ADA, BEN = 21001, 21002


class Service:
    """A service that answers, and records the requests in the order in which it handles them."""

    def __init__(self):
        self.counters = Counters()
        self.dispatcher = Dispatcher()
        self.log = logging.getLogger("test")
        self.handled = []
        self.connections = []
        self.answer_reads = True
        #: The payload of each answer.
        self.load = ""

    def connected(self, connection):
        self.connections.append(connection)

    def received(self, connection, message):
        self.handled.append((connection.peer.uid, message["type"]))
        if message["type"] == "journal" and not self.answer_reads:
            connection.begin_read()
            return
        connection.answer(message.get("id"), {"load": self.load})

    def disconnected(self, connection):
        self.connections.remove(connection)


def run(folder, monkeypatch, scenario):
    """Run ``scenario(service, connect)``; ``connect(uid)`` connects a socket as this user."""
    users = []
    monkeypatch.setattr(module, "peer_of", lambda _socket, _named: Peer(1, users.pop(0), 0))

    async def main():
        service, path = Service(), str(folder / "s")
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(lambda: Connection(service), path)
        opened = []

        async def connect(uid):
            count = service.counters.connections
            users.append(uid)
            made = socket.socket(socket.AF_UNIX)
            made.setblocking(False)
            opened.append(made)
            await loop.sock_connect(made, path)
            await until(lambda: service.counters.connections > count)
            return made

        try:
            await asyncio.wait_for(scenario(service, connect), 60)
        finally:
            for one in opened:
                one.close()
            await until(lambda: not service.connections)
            service.dispatcher.close()
            server.close()

    asyncio.run(main())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


async def messages(sock, count):
    """Return this many messages from a socket."""
    loop, data = asyncio.get_running_loop(), b""
    while data.count(b"\n") < count:
        chunk = await loop.sock_recv(sock, 1 << 16)
        assert chunk, "the broker closed the connection"
        data += chunk
    return [json.loads(text) for text in data.splitlines()]


def line(kind, **fields):
    return json.dumps({"v": 1, "type": kind, **fields}).encode() + b"\n"


def flood(count, kind="ping", **fields):
    return b"".join(line(kind, id=n, **fields) for n in range(1, count + 1))


# --------------------------------------------------------------------------- turns


def test_every_kind_of_request_has_a_price():
    assert set(PRICES) == set(REQUESTS)


def test_requests_of_two_users_are_handled_alternately(folder, monkeypatch):
    """Ada has 30 connections full of requests; Ben's requests are served between hers."""

    async def scenario(service, connect):
        hers = [await connect(ADA) for _ in range(30)]
        his = await connect(BEN)
        for one in hers:
            one.send(flood(200))
        his.send(flood(20))
        await messages(his, 20)
        before_his_last = service.handled[: service.handled.index((BEN, "ping")) + 1]
        last = max(n for n, (uid, _) in enumerate(service.handled) if uid == BEN)
        between = sum(uid == ADA for uid, _ in service.handled[len(before_his_last) : last])
        # All requests have the same price. So the broker handles at most one quantum of Ada's
        # requests before each request of Ben.
        assert between <= 20 * (dispatch.QUANTUM + 1)

    run(folder, monkeypatch, scenario)


def test_expensive_requests_get_fewer_turns(folder, monkeypatch):
    """A status costs more than a ping, so fewer statuses fit in an equal share."""

    async def scenario(service, connect):
        hers, his = await connect(ADA), await connect(BEN)
        hers.send(flood(150, "status"))
        his.send(flood(150))
        await messages(his, 150)
        statuses = service.handled.count((ADA, "status"))
        # A status has eight times the price of a ping. So the broker should answer 150 / 8 statuses
        # while it answers 150 pings. The test accepts 150 / 3, because a slow ping costs more than
        # its price.
        assert statuses < 150 / 3

    run(folder, monkeypatch, scenario)


def test_other_connections_of_the_same_user_get_their_turn(folder, monkeypatch):
    async def scenario(service, connect):
        busy, quiet = await connect(ADA), await connect(ADA)
        busy.send(flood(300))
        quiet.send(line("drop", hold="h", id=7))
        await messages(quiet, 1)
        assert len(service.handled) < 300

    run(folder, monkeypatch, scenario)


# --------------------------------------------------------------------------- budgets


def small_budgets(monkeypatch, *, reads=(1000.0, 20.0), acts=(1000.0, 50.0)):
    monkeypatch.setattr(dispatch, "READS", reads)
    monkeypatch.setattr(dispatch, "ACTS", acts)


def test_budget_of_a_user_covers_all_connections(folder, monkeypatch):
    small_budgets(monkeypatch, reads=(0.001, 20.0))

    async def scenario(service, connect):
        hers = [await connect(ADA) for _ in range(10)]
        for one in hers:
            one.send(flood(5))
        await until(lambda: service.dispatcher.delayed == 10)
        assert len(service.handled) <= 20 + 1
        # A new connection brings no new budget; another user has a budget of his own.
        hers[0].close()
        again, his = await connect(ADA), await connect(BEN)
        again.send(line("ping", id=1))
        his.send(line("ping", id=1))
        await messages(his, 1)
        await until(lambda: service.dispatcher.delayed == 11)

    run(folder, monkeypatch, scenario)


def test_reads_over_the_budget_are_only_delayed(folder, monkeypatch):
    small_budgets(monkeypatch)

    async def scenario(service, connect):
        hers = await connect(ADA)
        hers.send(flood(100))
        found = await messages(hers, 100)
        assert [m["id"] for m in found] == [*range(1, 101)]
        assert {m["type"] for m in found} == {"ok"}
        assert service.counters.throttled > 0
        assert service.counters.closed_for_abuse == 0

    run(folder, monkeypatch, scenario)


def test_read_that_waits_too_long_is_refused_with_retry_after(folder, monkeypatch):
    small_budgets(monkeypatch, reads=(0.5, 1.0))
    monkeypatch.setattr(dispatch, "PATIENCE", 0.05)

    async def scenario(service, connect):
        hers = await connect(ADA)
        hers.send(flood(3))
        first, second, _third = await messages(hers, 3)
        assert (first["type"], second["type"]) == ("ok", "error")
        assert second["code"] == "busy"
        assert second["id"] == 2
        assert second["details"]["retry_after"] > 0
        assert service.dispatcher.busy >= 1
        assert service.counters.closed_for_abuse == 0

    run(folder, monkeypatch, scenario)


def test_acts_do_not_wait_for_the_reads_of_their_user(folder, monkeypatch):
    """An act overtakes waiting reads, on another connection and on its own connection."""
    small_budgets(monkeypatch, reads=(0.001, 1.0))

    async def scenario(service, connect):
        flooding, kernel = await connect(ADA), await connect(ADA)
        flooding.send(flood(5))
        await until(lambda: service.dispatcher.delayed == 1)
        kernel.send(line("ping", id=1) + line("yielded", id=2, epoch=1, yielded=True))
        (answer,) = await messages(kernel, 1)
        assert answer["id"] == 2
        assert service.dispatcher.delayed == 2

    run(folder, monkeypatch, scenario)


def test_acts_over_the_budget_are_delayed_and_never_refused(folder, monkeypatch):
    small_budgets(monkeypatch, acts=(2000.0, 4.0))
    monkeypatch.setattr(dispatch, "PATIENCE", 0.0)

    async def scenario(service, connect):
        hers = await connect(ADA)
        hers.send(flood(60, "drop", hold="h"))
        found = await messages(hers, 60)
        assert [m["id"] for m in found] == [*range(1, 61)]
        assert {m["type"] for m in found} == {"ok"}
        assert service.counters.throttled > 0

    run(folder, monkeypatch, scenario)


def test_broker_does_not_read_a_flood_beyond_the_budget(folder, monkeypatch):
    """The broker reads only a few kilobytes ahead from a connection; the sender keeps the rest."""
    small_budgets(monkeypatch, reads=(0.001, 1.0))

    async def scenario(service, connect):
        hers = await connect(ADA)
        loop = asyncio.get_running_loop()
        sending = asyncio.ensure_future(loop.sock_sendall(hers, flood(100_000)))
        await until(lambda: service.dispatcher.delayed)
        await asyncio.sleep(0.05)
        assert not sending.done()
        (account,) = {c.account for c in service.connections}
        assert account.buffered <= 2 * module.CHUNK
        sending.cancel()

    run(folder, monkeypatch, scenario)


def test_token_bucket_can_be_overdrawn_and_refills():
    bucket = TokenBucket(10.0, 20.0, now=0.0)
    bucket.pay(50.0, now=0.0)
    assert bucket.left(0.0) == -30.0
    assert bucket.seconds_until(1.0, now=0.0) == pytest.approx(3.1)
    assert bucket.left(4.0) == 10.0
    assert bucket.left(1000.0) == 20.0


# --------------------------------------------------------------------------- bounds


def test_unfinished_requests_of_one_user_are_bounded(folder, monkeypatch):
    monkeypatch.setattr(module, "MAX_UNFINISHED", 500_000)

    async def scenario(service, connect):
        loop = asyncio.get_running_loop()
        for _ in range(4):
            hers = await connect(ADA)
            await loop.sock_sendall(hers, b'{"v":1,"x":"' + b"x" * (MAX_REQUEST - 50_000))
            await asyncio.sleep(0)
        await until(lambda: service.counters.closed_for_abuse)
        assert sum(c.buffered for c in service.connections) <= 500_000 + module.CHUNK

    run(folder, monkeypatch, scenario)


def test_acts_that_wait_for_the_budget_are_bounded(folder, monkeypatch):
    """Acts wait as bytes. The broker once decoded acts first, so 100 connections took 50 MB."""
    small_budgets(monkeypatch, acts=(0.001, 1.0))
    monkeypatch.setattr(module, "MAX_UNFINISHED", 500_000)
    holds = [{"id": f"{n:0200}", "kind": "cell"} for n in range(700)]
    hello = line("hello", id=1, session="s", token="t", holds=holds)

    async def scenario(service, connect):
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(await connect(ADA), line("drop", hold="h"))
        await until(lambda: service.handled)
        sending = [loop.create_task(loop.sock_sendall(await connect(ADA), hello)) for _ in range(5)]
        await until(lambda: service.counters.closed_for_abuse and service.counters.throttled >= 2)
        assert sum(c.buffered for c in service.connections) >= 2 * len(hello)
        account = service.connections[0].account
        assert account.buffered <= 500_000 + module.CHUNK
        assert service.handled == [(ADA, "drop")]
        account.acts.rate = account.acts.size = 1e6  # now the broker handles the waiting acts
        await asyncio.gather(*sending, return_exceptions=True)

    run(folder, monkeypatch, scenario)


def test_connection_with_an_unread_answer_gets_no_further_answer(folder, monkeypatch):
    """While a connection has an unread answer, the broker handles no further requests from it."""

    async def scenario(service, connect):
        service.load = "y" * 400_000
        hers = await connect(ADA)
        hers.send(flood(8))
        await until(lambda: service.handled)
        await asyncio.sleep(0.05)
        assert len(service.handled) <= 2
        assert len(await messages(hers, 8)) == 8
        (account,) = {c.account for c in service.connections}
        await until(lambda: account.unread == 0)

    run(folder, monkeypatch, scenario)


def test_peer_that_never_reads_is_disconnected(folder, monkeypatch):
    monkeypatch.setattr(module, "READER_PATIENCE", 0.05)

    async def scenario(service, connect):
        service.load = "y" * 400_000
        (await connect(ADA)).send(line("ping", id=1))
        await until(lambda: service.handled and not service.connections)
        assert service.counters.closed_for_abuse == 1

    run(folder, monkeypatch, scenario)


def test_unread_pushes_close_the_connection(folder, monkeypatch):
    monkeypatch.setattr(module, "MAX_UNREAD", 300_000)

    async def scenario(service, connect):
        await connect(ADA)
        (connection,) = service.connections
        for _ in range(100):
            if not connection.open:
                break
            connection.send({"type": "event", "load": "y" * 10_000})
        assert service.counters.closed_for_abuse == 1
        await until(lambda: connection.account.unread == 0)

    run(folder, monkeypatch, scenario)


def test_unread_answers_of_a_user_are_bounded_in_total(folder, monkeypatch):
    monkeypatch.setattr(dispatch, "USER_UNREAD", 2_000_000)

    async def scenario(service, connect):
        service.load = "y" * 700_000
        his = await connect(BEN)
        for _ in range(20):
            (await connect(ADA)).send(line("ping", id=1))
        await until(lambda: len(service.handled) == 20)
        (hers,) = {c.account for c in service.connections if c.peer.uid == ADA}
        assert hers.unread <= 2_000_000
        assert service.counters.closed_for_abuse >= 10
        his.send(line("ping", id=1))
        assert len(await messages(his, 1)) == 1

    run(folder, monkeypatch, scenario)


def test_user_without_connections_is_forgotten(folder, monkeypatch):
    async def scenario(service, connect):
        hers = await connect(ADA)
        hers.send(line("ping", id=1))
        await messages(hers, 1)
        assert ADA in service.dispatcher._accounts
        hers.close()
        await until(lambda: ADA not in service.dispatcher._accounts)

    run(folder, monkeypatch, scenario)


class HalfClosed(asyncio.Transport):
    """A transport to a peer that has closed its sending side and never reads."""

    def __init__(self, protocol):
        super().__init__()
        self.protocol, self.left, self.closing = protocol, 0, False

    def get_extra_info(self, name, default=None):
        return None

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass

    def write(self, data):
        self.left += len(data)

    def get_write_buffer_size(self):
        return self.left

    def is_closing(self):
        return self.closing

    def close(self):
        self.closing = True
        if not self.left:
            self.abort()

    def abort(self):
        self.closing, self.left = True, 0
        if self.protocol is not None:
            protocol, self.protocol = self.protocol, None
            protocol.connection_lost(None)


def test_unread_bytes_of_closing_connections_are_bounded(monkeypatch):
    """The unread bytes of a closing connection count until the broker has discarded them."""
    monkeypatch.setattr(module, "peer_of", lambda _socket, _named: Peer(1, ADA, 0))
    monkeypatch.setattr(dispatch, "USER_UNREAD", 300_000)

    async def main():
        service = Service()
        made = []
        for number in range(100):
            # If there are too many unread bytes, the broker closes the connection with the most.
            # Each peer has fewer unread bytes than the peer before it. So the connection with the
            # most unread bytes is one that is already closing.
            service.load = "x" * (30_000 - 10 * number)
            connection = Connection(service)
            transport = HalfClosed(connection)
            made.append(transport)
            connection.connection_made(transport)
            request = line("ping", id=1)
            connection.get_buffer(-1)[: len(request)] = request
            connection.buffer_updated(len(request))
            connection.eof_received()
            await until(lambda transport=transport: transport.closing)
            assert sum(one.left for one in made) <= 400_000
        for one in made:
            one.abort()
        assert not service.connections
        service.dispatcher.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_stalled_long_requests_are_closed_and_others_handled(folder, monkeypatch):
    """Long requests that never became complete once blocked all other long requests of the user."""
    monkeypatch.setattr(module, "READER_PATIENCE", 2.0)
    part = b'{"v":1,"type":"ping","id":1,"x":"' + b"x" * (2 * module.CHUNK)

    async def scenario(service, connect):
        loop = asyncio.get_running_loop()
        stalled = [await connect(ADA) for _ in range(dispatch.MAX_LONG)]
        for one in stalled:
            await loop.sock_sendall(one, part)
        (account,) = {c.account for c in service.connections}
        await until(lambda: len(account.long) == dispatch.MAX_LONG)
        hers = await connect(ADA)
        await loop.sock_sendall(hers, part)
        await until(lambda: account.longer)
        await until(lambda: service.counters.closed_for_abuse == dispatch.MAX_LONG)
        await loop.sock_sendall(hers, b'"}\n')
        await until(lambda: service.handled == [(ADA, "ping")])
        for one in stalled:
            (error,) = await messages(one, 1)
            assert error["code"] == "abuse"
            assert "the rest of a long request" in error["message"]
        assert not account.long
        # A connection whose request was complete in time stays open.
        await asyncio.sleep(2.1)
        assert len(service.connections) == 1

    run(folder, monkeypatch, scenario)


def test_long_requests_of_a_user_are_read_a_few_at_a_time(folder, monkeypatch):
    """If the broker read all of them at once, a hundred senders would keep its event loop busy."""
    size, count = 200_000, 3 * dispatch.MAX_LONG
    line = b'{"v":1,"type":"ping","id":1,"x":"' + b"x" * size

    async def scenario(service, connect):
        loop = asyncio.get_running_loop()
        senders = [await connect(ADA) for _ in range(count)]
        ends = [asyncio.ensure_future(loop.sock_sendall(one, line)) for one in senders]
        await until(lambda: sum(c.buffered == len(line) for c in service.connections)
                    == dispatch.MAX_LONG)  # fmt: skip
        await until(lambda: all(c.buffered >= module.CHUNK for c in service.connections))

        def read_on():
            return [c for c in service.connections if c.buffered > 2 * module.CHUNK]

        long = read_on()
        assert len(long) == dispatch.MAX_LONG, "the others wait in their senders"
        # While Ada's other long requests wait, the broker reads Ben's long request and Ada's short
        # request.
        (ben, short) = await connect(BEN), await connect(ADA)
        await loop.sock_sendall(ben, line + b'"}\n')
        await loop.sock_sendall(short, b'{"v":1,"type":"ping","id":1}\n')
        await until(lambda: {(BEN, "ping"), (ADA, "ping")} <= {*service.handled})
        # When a connection closes, the broker reads the next long request of the user.
        leaver = senders[service.connections.index(long[0])]
        ends[senders.index(leaver)].cancel()
        leaver.close()
        await until(lambda: len(read_on()) == dispatch.MAX_LONG and long[0] not in read_on())
        rest = [pair for pair in zip(senders, ends, strict=True) if pair[0] is not leaver]
        await asyncio.gather(*(finish(loop, one, end) for one, end in rest))
        await until(lambda: len(service.handled) == 2 + len(rest))

    async def finish(loop, one, end):
        await end
        await loop.sock_sendall(one, b'"}\n')

    run(folder, monkeypatch, scenario)


# --------------------------------------------------------------------------- garbage collection


def test_garbage_is_collected_often_and_in_small_parts(folder, monkeypatch):
    """Requests that replace old objects by new objects must not delay the garbage collection.

    Python counts the new objects less the freed objects, so its count stays low here. In the past,
    Python therefore scanned all objects in the middle of a request.
    """
    young = []

    async def scenario(service, connect):
        sock = await connect(ADA)
        kept = [[] for _ in range(3000)]
        gc.collect()
        received = service.received

        def replacing(connection, message):
            for at in range(100):
                kept[(100 * len(young) + at) % 3000] = []
            young.append(len(gc.get_objects(0)) + len(gc.get_objects(1)))
            received(connection, message)

        service.received = replacing
        for _ in range(8):
            await asyncio.get_running_loop().sock_sendall(sock, flood(25))
            await messages(sock, 25)

    run(folder, monkeypatch, scenario)
    assert max(young[40:]) < 2500
