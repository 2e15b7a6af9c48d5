# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Groups of a pool whose members are those of groups in JupyterHub.

Put it into a configuration file of the broker. The Hub's configuration names the broker a service
that may read who is in which group, and its token is in a file that only the broker's user reads:

    c.JupyterHub.services = [{"name": "gpupool", "api_token": "..."}]
    c.JupyterHub.load_roles = [
        {"name": "gpupool", "scopes": ["read:users:groups"], "services": ["gpupool"]}
    ]
"""

import json
from pathlib import Path
from urllib.parse import quote
from urllib.request import Request, urlopen

HUB = "http://127.0.0.1:8081/hub/api"
TOKEN = Path("/etc/gpupool/hub-token")


def groups_in_the_hub(user):
    """Return the groups of a user of the Hub, which has the same name on this machine."""
    token = TOKEN.read_text().strip()
    request = Request(f"{HUB}/users/{quote(user)}", headers={"Authorization": f"token {token}"})
    with urlopen(request, timeout=4) as answer:
        return json.load(answer)["groups"]


c = get_config()

c.GPUPool.hub_groups = groups_in_the_hub
c.GPUPool.groups = {
    "research": {"hub_groups": ["research"], "guarantee": "60%"},
    "students": {"users": "*"},
}
