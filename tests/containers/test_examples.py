# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``examples/containers`` agrees with the code; ``test_docker.py`` runs these files."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from traitlets.config import Config

from jupyter_gpupool.broker.transport import usersockets
from jupyter_gpupool.config import load_settings
from jupyter_gpupool.containers.content import Content
from jupyter_gpupool.endpoint import MACHINE_SOCKET

EXAMPLES = Path(__file__).parents[2] / "examples" / "containers"


@pytest.fixture
def hub(monkeypatch):
    """The Hub's configuration, and the global variables that the configuration file defines."""
    config = Config()
    found = runpy.run_path(str(EXAMPLES / "jupyterhub_config.py"), {"get_config": lambda: config})
    return config, found


def test_example_file_of_the_broker_enables_user_sockets():
    assert load_settings([EXAMPLES / "user_sockets.py"]).user_sockets


def test_servers_get_their_users_folder_read_only(hub):
    config, _ = hub
    assert config.DockerSpawner.volumes == {
        f"{MACHINE_SOCKET.parent}/users/{{raw_username}}": {
            "bind": str(MACHINE_SOCKET.parent), "mode": "ro",
        }
    }  # fmt: skip
    kernels = Content(MACHINE_SOCKET).folder / "share" / "jupyter"
    assert config.DockerSpawner.environment["JUPYTER_PATH"] == str(kernels)


@pytest.mark.parametrize(
    "name", ["ada", "ada@example.org", "a" * 64, "../ada", ".x", "a/b", "", "a" * 65]
)
def test_the_hub_refuses_the_names_that_the_broker_refuses(hub, name):
    check, spawner = hub[1]["check_name"], SimpleNamespace(user=SimpleNamespace(name=name))
    if usersockets._NAME.fullmatch(name):
        check(spawner)
    else:
        with pytest.raises(ValueError, match="cannot be a user of the GPU pool"):
            check(spawner)


def test_the_compose_file_starts_the_hub_of_the_example(hub):
    compose = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())
    assert compose.keys() == {"services", "networks", "volumes"}
    service = compose["services"]["hub"]
    assert service["volumes"][0] == "./jupyterhub_config.py:/srv/jupyterhub_config.py:ro"
    assert service["command"].endswith(" -f /srv/jupyterhub_config.py")
    assert compose["networks"][service["networks"][0]]["name"] == hub[0].DockerSpawner.network_name
    assert service["environment"]["HUB_HOST"] == hub[0].JupyterHub.hub_connect_ip
