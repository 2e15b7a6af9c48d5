# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The example that takes groups from JupyterHub, with a stand-in for the Hub.

The stand-in follows JupyterHub's documentation of its REST API.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import HTTPError

import pytest
from traitlets.config.loader import PyFileConfigLoader

from jupyter_gpupool import starting
from jupyter_gpupool.config import load_settings
from jupyter_gpupool.config.grouping import groups_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "hub_groups.py"
USERS = {"ada": ["research", "chess"], "j r": [], "bob": []}
ROLES = {"ada": ["user"], "bob": ["user", "gpu-course"]}


class Hub(BaseHTTPRequestHandler):
    """A stand-in for the Hub. It describes a user to a client that has the right token."""

    def do_GET(self):
        name = self.path.removeprefix("/hub/api/users/").replace("%20", " ")
        known = self.headers["Authorization"] == "token s3cret"
        self.send_response(200 if known and name in USERS else 404 if known else 403)
        self.end_headers()
        if known and name in USERS:
            model = {"kind": "user", "name": name, "groups": USERS[name]}
            if name in ROLES:  # the Hub sends roles only to a service that may read them
                model["roles"] = ROLES[name]
            self.wfile.write(json.dumps(model).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_example_takes_groups_from_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    token, file = tmp_path / "token", tmp_path / "config.py"
    text = EXAMPLE.read_text()
    text = text.replace("http://127.0.0.1:8081", hub).replace("/etc/gpupool/hub-token", str(token))
    file.write_text(text)
    settings = load_settings([file])
    assert settings.hub_groups is not None
    token.write_text("s3cret\n")
    found = {user: settings.hub_groups(user) for user in USERS}
    assert found == {
        "ada": ["research", "chess", "role:user"], "j r": [],
        "bob": ["role:user", "role:gpu-course"],
    }  # fmt: skip
    groups = {user: groups_of(settings.members, user, (), names) for user, names in found.items()}
    assert groups == {
        "ada": ("research", "students"), "j r": ("students",), "bob": ("course", "students")
    }  # fmt: skip
    assert settings.hub_groups("root") == []  # an account that the Hub does not know
    token.write_text("wrong")
    with pytest.raises(HTTPError):
        settings.hub_groups("ada")


def test_server_with_the_example_starts_its_users_broker():
    """The server passes its options to the broker as JSON, so without the function ``hub_groups``.

    The broker reads this function from the same configuration file.
    """
    section = {"GPUPool": {"hub_groups": len, "idle_timeout": 5}}
    assert starting._section(section) == {"idle_timeout": 5}


def test_example_for_the_hub_keeps_options_of_other_files(tmp_path):
    token, file = tmp_path / "token", tmp_path / "jupyterhub_config.py"
    token.write_text("s3cret\n")
    text = (EXAMPLE.parent / "jupyterhub" / "jupyterhub_config.py").read_text()
    file.write_text(text.replace("/etc/gpupool/hub-token", str(token)))
    before = tmp_path / "tljh.py"  # as The Littlest JupyterHub does, load the admin's file last
    before.write_text(
        "c = get_config()\n"
        'c.JupyterHub.services = [{"name": "cull-idle"}]\n'
        'c.JupyterHub.load_roles = [{"name": "idle-culler"}]\n'
        'c.JupyterHub.load_groups = {"admins": {"users": []}}\n'
        f"load_subconfig({str(file)!r})\n"
    )
    hub = PyFileConfigLoader(before.name, str(tmp_path)).load_config().JupyterHub
    assert [one["name"] for one in hub.services] == ["cull-idle", "gpupool"]
    assert [one["name"] for one in hub.load_roles] == ["idle-culler", "gpupool", "gpu-course"]
    assert [*hub.load_groups] == ["admins", "research"]
    alone = PyFileConfigLoader(file.name, str(tmp_path)).load_config().JupyterHub
    (service,) = alone.services.get_value([])
    assert service == {"name": "gpupool", "api_token": "s3cret"}
