# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""JupyterHub on one machine whose users share its GPUs through the machine's pool.

The pool itself is a service: ``jupyter gpupool install-service``. This file adds what JupyterHub
has to know. Choose an authenticator for your site, too; the default one asks PAM.
"""

from pathlib import Path

c = get_config()

# Server and kernels of a user run as the user's account: by it the broker knows who they are.
# SystemdSpawner and SudoSpawner do the same. Leave this line out where the Hub has one of them
# already, as The Littlest JupyterHub does.
c.JupyterHub.spawner_class = "jupyterhub.spawner.LocalProcessSpawner"

# Several servers for a user are one user to the pool: they share one quota.
c.JupyterHub.allow_named_servers = True

# Servers, and what their kernels have on a GPU, outlive a restart of the Hub.
c.JupyterHub.cleanup_servers = False

# The broker may ask who is in which group and role, see hub_groups.py. What other files of the
# Hub's configuration put into these lists stays.
TOKEN = Path("/etc/gpupool/hub-token")
c.JupyterHub.services.append({"name": "gpupool", "api_token": TOKEN.read_text().strip()})
c.JupyterHub.load_roles.extend(
    [
        {
            "name": "gpupool",
            "scopes": ["read:users:groups", "read:roles:users"],
            "services": ["gpupool"],
        },
        # A role without rights in the Hub: it only chooses a group of the pool.
        {"name": "gpu-course", "scopes": ["self"], "users": []},
    ]
)
c.JupyterHub.load_groups.update({"research": {"users": []}})
