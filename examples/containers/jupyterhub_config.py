# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""JupyterHub with DockerSpawner, whose servers share the machine's GPUs through the pool.

The machine's broker has ``c.GPUPool.user_sockets = True``. Choose an authenticator for your site.
"""

import os
import re

c = get_config()

c.JupyterHub.spawner_class = "dockerspawner.DockerSpawner"
c.JupyterHub.hub_ip = "0.0.0.0"
c.JupyterHub.hub_connect_ip = os.environ.get("HUB_HOST", "hub")
c.DockerSpawner.network_name = os.environ.get("HUB_NETWORK", "hub")
c.DockerSpawner.image = os.environ.get("SERVER_IMAGE", "quay.io/jupyter/base-notebook:latest")
c.DockerSpawner.remove = True

# Docker makes a folder for each user, and the broker makes the user's socket in this folder. The
# folder's name becomes the user's name in the pool. So the folder must have the user's name in the
# Hub.
c.DockerSpawner.volumes = {
    "/run/gpupool/users/{raw_username}": {"bind": "/run/gpupool", "mode": "ro"},
}
c.DockerSpawner.environment = {
    # In this folder, Jupyter finds the kernel "Pooled GPU". The image needs no package of the pool.
    "JUPYTER_PATH": "/run/gpupool/inside/share/jupyter",
    # The container sees all GPUs, because the pool chooses among them.
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
}
c.DockerSpawner.extra_host_config = {"runtime": "nvidia"}
# The state of a suspended kernel is in its container's memory, so make this limit large enough.
c.DockerSpawner.mem_limit = "64G"


def check_name(spawner):
    """Refuse a user whose name cannot be the name of a folder."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}", spawner.user.name):
        raise ValueError(f"{spawner.user.name!r} cannot be a user of the GPU pool")


c.Spawner.pre_spawn_hook = check_name
