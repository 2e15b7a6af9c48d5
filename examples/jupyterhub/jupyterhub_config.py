# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""JupyterHub on one machine whose users share its GPUs through the machine's pool.

The pool itself is a service: ``jupyter gpupool install-service``. This file contains the settings
that JupyterHub needs for it. Choose an authenticator for your site, too; the default authenticator
asks PAM.
"""

from pathlib import Path

c = get_config()

# This spawner runs a user's server and kernels under the user's own account. The broker identifies
# the user by this account. SystemdSpawner and SudoSpawner also use the user's account. If the Hub
# already has one of these two spawners (as in The Littlest JupyterHub), leave this line out.
c.JupyterHub.spawner_class = "jupyterhub.spawner.LocalProcessSpawner"

# A user may have several servers. The pool counts all their kernels for this one user and quota.
c.JupyterHub.allow_named_servers = True

# Servers, kernels and the kernels' state on the GPU survive a restart of the Hub.
c.JupyterHub.cleanup_servers = False

# The broker may ask the Hub for the groups and roles of users, see hub_groups.py. Another
# configuration file of the Hub may already have entries in these lists. The lines below keep these
# entries.
TOKEN = Path("/etc/gpupool/hub-token")
c.JupyterHub.services.append({"name": "gpupool", "api_token": TOKEN.read_text().strip()})
c.JupyterHub.load_roles.extend(
    [
        {
            "name": "gpupool",
            "scopes": ["read:users:groups", "read:roles:users"],
            "services": ["gpupool"],
        },
        # This role gives no rights in the Hub. It only chooses a group of the pool.
        {"name": "gpu-course", "scopes": ["self"], "users": []},
    ]
)
c.JupyterHub.load_groups.update({"research": {"users": []}})
