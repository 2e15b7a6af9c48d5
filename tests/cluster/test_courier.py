# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The agent's requests to a broker: several requests may wait for answers at the same time."""

from __future__ import annotations

import asyncio
import json

import pytest

from jupyter_gpupool.broker.messages.remote import result_text
from jupyter_gpupool.broker.request_fields import CREDENTIAL, decode_request
from jupyter_gpupool.cluster.broker_calls import broker_calls
from jupyter_gpupool.cluster.mail import Mail
from jupyter_gpupool.errors import ProtocolError, RefusedError
from jupyter_gpupool.protocol import MAX_REQUEST, decode, encode


def test_the_answer_of_one_call_ends_only_that_call(tmp_path):
    async def run():
        ended = asyncio.Event()

        async def answer_in_order(reader, writer):
            """Read two requests and answer the first. Read the third, and answer the other two."""
            requests = [decode(await reader.readline()) for _ in range(2)]
            for number in range(3):
                if number == 1:
                    requests.append(decode(await reader.readline()))
                request = requests[number]
                writer.write(encode({"type": "ok", "id": request["id"], "of": request["type"]}))
            await reader.read()
            writer.close()
            ended.set()

        path = tmp_path / "broker.sock"
        async with await asyncio.start_unix_server(answer_in_order, str(path)):
            async with broker_calls(path) as link:
                calls = [asyncio.ensure_future(link.call(kind, 30)) for kind in ("account", "lend")]
                first = await calls[0]
                third = await link.call("ping", 30)
                found = [first, await calls[1], third]
            await ended.wait()
        return [answer["of"] for answer in found]

    assert asyncio.run(run()) == ["account", "lend", "ping"]


@pytest.mark.parametrize("credential", ["\xe9", "\x7f", "a\nb", "x" * (CREDENTIAL.most + 1)])
def test_a_credential_is_printable_and_short(credential):
    order = {"type": "order", "id": 1, "node": "m1", "credential": credential}
    with pytest.raises(ProtocolError):
        decode_request(encode(order))


def test_an_agent_can_carry_every_credential():
    worst = decode_request(encode({
        "type": "order", "id": 1, "node": "m1", "credential": '"' * CREDENTIAL.most
    }))  # fmt: skip
    line = encode({"type": "perform", "id": 1 << 60, "credential": worst["credential"]})
    assert len(line) < MAX_REQUEST


class Link:
    """The broker of m0, with one order for m1. It keeps the result that the courier reports."""

    def __init__(self):
        self.told = asyncio.get_running_loop().create_future()
        self._asked = False

    async def call(self, kind, patience, **fields):
        if kind == "performed":
            self.told.set_result(fields)
            return {}
        if self._asked:
            await asyncio.Event().wait()
        self._asked = True
        return {"node": "m0", "orders": [{"name": "n", "node": "m1", "credential": "c"}]}


def test_an_order_is_answered_at_once_if_no_ledger_takes_it():
    async def relay(node, text):
        raise ConnectionResetError("no ledger")

    async def run():
        link = Link()
        fetch = asyncio.ensure_future(Mail(link, relay).fetch())
        try:
            return await asyncio.wait_for(link.told, 20)
        finally:
            fetch.cancel()

    told = asyncio.run(run())
    answer = json.loads(told["result"])
    assert (told["name"], answer["type"], answer["code"]) == ("n", "error", "unreachable")
    assert "m1 cannot be reached: the ledger, which passes orders on, does not" in answer["message"]


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("log", ["\n" * (1 << 16), "\xe9" * (1 << 16), nested(100_000)])
def test_a_result_too_large_for_an_agent_is_refused(log):
    text = result_text({"type": "ok", "log": log})
    assert json.loads(text)["code"] == "too-long"
    whole = "\ufffd" * (16 << 10)
    text = result_text({"type": "ok", "log": whole})
    assert json.loads(text)["log"] == whole
    assert (
        decode_request(
            encode({"type": "performed", "id": 1 << 60, "name": "n" * 100, "result": text})
        )["result"]
        == text
    )


def test_a_too_long_request_does_not_end_the_connection(tmp_path):
    async def run():
        ended = asyncio.Event()

        async def echo(reader, writer):
            while line := await reader.readline():
                writer.write(encode({"type": "ok", "id": decode(line)["id"]}))
            writer.close()
            ended.set()

        path = tmp_path / "broker.sock"
        async with await asyncio.start_unix_server(echo, str(path), limit=1 << 20):
            async with broker_calls(path) as link:
                with pytest.raises(RefusedError, match="was not sent") as error:
                    await link.call("performed", 30, name="n", result="x" * MAX_REQUEST)
                found = error.value.code, (await link.call("ping", 30))["type"]
            await ended.wait()
        return found

    assert asyncio.run(run()) == ("too-long", "ok")
