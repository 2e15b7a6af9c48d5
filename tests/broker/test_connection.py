# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Limits for one peer: which input closes a connection, and which does not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging

import pytest

from jupyter_gpupool.broker.transport import connection as module
from jupyter_gpupool.broker.transport.connection import Connection, Counters
from jupyter_gpupool.broker.transport.dispatch import Dispatcher
from jupyter_gpupool.errors import RefusedError
from jupyter_gpupool.protocol import MAX_REQUEST


class Echo:
    """A service that answers pings and refuses watches."""

    def __init__(self):
        self.counters = Counters()
        self.dispatcher = Dispatcher()
        self.log = logging.getLogger("test")
        self.living = set()
        self.refuse_all = None

    def connected(self, connection):
        if self.refuse_all:
            raise self.refuse_all
        self.living.add(connection)

    def received(self, connection, message):
        if message["type"] == "watch":
            raise RefusedError("No.", code="no")
        if message["type"] == "status":
            raise ZeroDivisionError
        connection.answer(message.get("id"), {"n": message.get("limit")})

    def disconnected(self, connection):
        self.living.remove(connection)


def run(folder, scenario):
    """Serve a socket, and run ``scenario(service, connect)``; ``connect()`` opens a connection."""

    async def main():
        service, path = Echo(), str(folder / "s")
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: Connection(service), path
        )

        async def connect():
            return await asyncio.open_unix_connection(path, limit=4 << 20)

        try:
            await asyncio.wait_for(scenario(service, connect), 60)
        finally:
            server.close()

    asyncio.run(main())


def line(**message):
    return json.dumps({"v": 1, **message}).encode() + b"\n"


async def messages(reader):
    return [json.loads(text) async for text in reader]


def test_answers_keep_the_order_and_fields_of_requests(folder):
    async def scenario(service, connect):
        reader, writer = await connect()
        writer.write(b"".join(line(type="journal", id=n, limit=n) for n in range(1, 500)))
        writer.write_eof()
        found = await messages(reader)
        assert [(m["id"], m["n"]) for m in found] == [(n, n) for n in range(1, 500)]
        writer.close()

    run(folder, scenario)


def test_a_message_in_pieces_is_one_message(folder):
    async def scenario(service, connect):
        reader, writer = await connect()
        for byte in line(type="ping", id=1):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        assert json.loads(await reader.readline())["id"] == 1
        writer.close()

    run(folder, scenario)


@pytest.mark.parametrize(
    "rubbish",
    [
        b"GET / HTTP/1.1\n",
        b"\x00\xff\xfe\n",
        b"[]\n",
        b"{}\n",
        b'{"v":1,"type":5}\n',
        b"[" * 100_000 + b"\n",
        b'{"v":2,"type":"ping"}\n',
        b'{"v":1,"type":"nonsense"}\n',
        b'{"v":1,"type":"ping","id":-1}\n',
        b'{"v":1,"type":"ping","id":true}\n',
        b'{"v":1,"type":"hold","hold":5,"kind":"cell"}\n',
        b"\n",
    ],
)
def test_rubbish_gets_an_error_and_the_peer_stays_connected(folder, rubbish):
    async def scenario(service, connect):
        reader, writer = await connect()
        writer.write(rubbish)
        assert json.loads(await reader.readline())["type"] == "error"
        writer.write(line(type="ping", id=7))
        assert json.loads(await reader.readline())["id"] == 7
        assert service.counters.bad_messages == 1
        writer.close()

    run(folder, scenario)


def test_peer_that_sends_only_rubbish_is_disconnected(folder):
    async def scenario(service, connect):
        reader, writer = await connect()
        writer.write(b"x\n" * 100)
        found = await messages(reader)
        assert len(found) == module.MAX_BAD + 1
        assert found[-1]["code"] == "abuse"
        assert service.counters.closed_for_abuse == 1
        writer.close()

    run(folder, scenario)


def test_connection_with_an_endless_line_is_closed(folder):
    async def scenario(service, connect):
        reader, writer = await connect()
        writer.write(b"x" * (MAX_REQUEST + 70_000))
        with contextlib.suppress(ConnectionError):  # the broker may close during the write
            found = await messages(reader)
            assert [m["code"] for m in found] == ["too-long", "abuse"]
        assert service.counters.closed_for_abuse == 1
        writer.close()

    run(folder, scenario)


def test_incomplete_last_line_is_counted_as_bad(folder):
    async def scenario(service, connect):
        reader, writer = await connect()
        writer.write(b'{"v":1,"type":')
        writer.write_eof()
        (error,) = await messages(reader)
        assert "middle" in error["message"]
        assert service.counters.bad_messages == 1
        writer.close()

    run(folder, scenario)


def test_refusals_and_internal_faults_are_answered(folder, caplog):
    async def scenario(service, connect):
        reader, writer = await connect()
        writer.write(line(type="watch", id=1) + line(type="status", id=2) + line(type="ping", id=3))
        found = [json.loads(await reader.readline()) for _ in range(3)]
        assert [m.get("code") for m in found] == ["no", "internal", None]
        assert "ZeroDivisionError" in caplog.text
        writer.close()

    run(folder, scenario)


def test_peer_that_is_not_served_gets_a_reason(folder):
    async def scenario(service, connect):
        service.refuse_all = RefusedError("Not you.", code="not-served")
        reader, writer = await connect()
        (error,) = await messages(reader)
        assert error["code"] == "not-served"
        assert not service.living
        writer.close()

    run(folder, scenario)
