# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A second server with another configuration joins the running broker.

The server tells its user that the broker uses another configuration.
"""

from __future__ import annotations

import json
import subprocess
import sys

from .kit import MiB
from .scenes import play, said

MACHINE = "1x640MiB,context=32MiB"
SLICE = 256 * MiB


def command(*words):
    line = [sys.executable, "-m", "jupyter_gpupool.cli", *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=100, check=False).stdout


def test_second_server_says_which_configuration_is_in_force(pool, caplog):
    pool = pool(MACHINE, default_memory=SLICE)
    path = pool.folder / "config" / "jupyter_server_config.json"

    async def scenario():
        first = await pool.kernel("first")
        same = (await first.run("print('hi')")).check()
        assert same.text == "hi\n"
        assert same.displays == []
        second = await pool.kernel("second", server={**pool.config, "idle_timeout": 5})
        cell = (await second.run("print('hi')")).check()
        expected = (
            f"c.GPUPool.idle_timeout is 3600 s (from {path}), not 5 s (from the command line)"
        )
        assert expected in said(cell), cell
        assert cell.text.endswith("hi\n")
        assert "another configuration" not in said((await second.run("1 + 1")).check())
        # The variable with the notice is removed from the environment that child processes inherit.
        seen = await second.run("import os; print('GPUPOOL_NOTICE' in os.environ)")
        assert seen.text == "False\n"
        await pool.stop_kernels()

    play(scenario())
    assert sum("another configuration" in record.getMessage() for record in caplog.records) == 1
    # If a configuration file changes after the broker's start, the commands report this.
    path.write_text(json.dumps({"GPUPool": {**pool.config, "idle_timeout": 7}}))
    status = command("status")
    assert "c.GPUPool.idle_timeout is 3600 s" in status, status
    assert "not 7 s" in status
    found = json.loads(command("doctor", "--json"))
    told = [f for f in found if "idle_timeout" in f["message"]]
    assert len(told) == 1
    assert told[0]["verdict"] == "warn"
    assert "SIGHUP" in told[0]["todo"]
