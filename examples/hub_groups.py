# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Groups of a pool that get their members from groups in JupyterHub.

Put these lines into a configuration file of the broker. In the Hub's configuration, the broker is a
service that may read the groups and the roles of users, see ``jupyterhub/jupyterhub_config.py``.
The service's token is in a file that only root and the Hub can read.
"""

import json
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

HUB = "http://127.0.0.1:8081/hub/api"
TOKEN = Path("/etc/gpupool/hub-token")


def groups_in_the_hub(name):
    """Return the groups and roles that the user ``name`` has in the Hub.

    A role has the form "role:NAME". The user has the same name on this machine and in the Hub.
    """
    token = TOKEN.read_text().strip()
    request = Request(f"{HUB}/users/{quote(name)}", headers={"Authorization": f"token {token}"})
    try:
        with urlopen(request, timeout=4) as answer:
            user = json.load(answer)
    except HTTPError as error:
        if error.code == 404:  # the user has an account on this machine, but not in the Hub
            return []
        raise
    return [*user["groups"], *(f"role:{role}" for role in user.get("roles", ()))]


c = get_config()

c.GPUPool.hub_groups = groups_in_the_hub
c.GPUPool.groups = {
    "research": {"hub_groups": ["research"], "guarantee": "60%"},
    "course": {"hub_groups": ["role:gpu-course"], "cap": "50%"},
    "students": {"users": "*"},
}
