# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A real JupyterHub with only the account of the tests: the short form of ``test_hub.py``.

Only the long form has two accounts, the service's capabilities, restarts and the Node.js proxy.
"""

from __future__ import annotations

import os
import pwd

import pytest

from tests.broker import kit
from tests.broker.kit import wait_until
from tests.server.kit import server_environment

from .kit import TESTS, Hub
from .test_hub import CHECK, FILL, owners


@pytest.fixture
def site():
    """A Hub with one user, the account of the tests, and a broker that asks the Hub for groups."""
    folder = kit.short_folder()
    name = pwd.getpwuid(os.geteuid()).pw_name
    broker = kit.Broker(folder, emulate=kit.ONE, default_memory=200 * kit.MiB)
    # The server writes into the test's folder, not into this account's home.
    kept = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR")
    places = server_environment(folder, broker.socket)
    hub = Hub(
        folder, broker.socket, course=[name], installed=TESTS,
        environment={variable: places[variable] for variable in kept},
        arguments=[f"--ServerApp.root_dir={folder}", "--ServerApp.allow_root=True",
                   "--LanguageServerManager.autodetect=False"],
    )  # fmt: skip
    settings = broker.config_file
    broker.config_file = folder / "pool.py"  # the example, plus the options of a test broker
    with broker.config_file.open("a") as file:
        file.write(f"c.GPUPool.update(json.loads(Path({str(settings)!r}).read_text())['GPUPool'])")
    try:
        hub.start()
        yield hub, broker.started, name
    finally:
        hub.close()
        print(hub.tail())
        broker.close()
        print(broker.tail())
        kit.remove(folder)


def test_hub_role_of_a_user_limits_the_users_kernel(site):
    hub, broker, name = site
    kernel = hub.kernel(hub.spawn(name))
    kernel.run(FILL % 7)
    # In the example, the course may have half a GPU.
    refused = kernel.end(kernel.begin("%gpu 300MiB"))
    assert "your group course may have at most 256 MiB" in refused["evalue"]
    (session,) = broker.status()["sessions"]
    # The group comes from a role of the Hub.
    assert (session["owner"], session["group"]) == (name, "course")
    assert [s["granted_bytes"] for s in session["slices"]] == [200 * kit.MiB]
    kernel.run(CHECK % 7)
    hub.call("DELETE", f"/users/{name}/server")
    wait_until(lambda: not owners(broker), "the end of the stopped server's kernel")
