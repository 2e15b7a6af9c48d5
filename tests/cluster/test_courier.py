# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The agent's requests to a broker, of which several are under way."""

from __future__ import annotations

import asyncio

from jupyter_gpupool.cluster.broker_calls import broker_calls
from jupyter_gpupool.protocol import decode, encode


def test_the_answer_of_one_call_ends_only_that_call(tmp_path):
    async def run():
        ended = asyncio.Event()

        async def answer_in_order(reader, writer):
            """Answer the first request once the second is there, and that one after the third."""
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
