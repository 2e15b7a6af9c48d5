# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Configures the server of the browser tests. It has no protection: use it for tests only."""

from jupyter_client import launcher
from jupyterlab.galata import configure_jupyter_server

from tests.broker import forks

# Fork the kernels, as the Python tests do. The start of a forked kernel needs a fifth of the CPU
# time.
launcher.Popen = forks.kernels

c = get_config()  # noqa: F821
configure_jupyter_server(c)
c.ServerApp.ip = "127.0.0.1"
c.ServerApp.port = 0
c.JupyterNotebookApp.expose_app_in_browser = True
# Without this setting, each page asks the server whether JupyterLab must be built again. To answer,
# the server starts Node twice.
c.ServerApp.tornado_settings = {"page_config_data": {"buildCheck": False}}
c.LanguageServerManager.autodetect = False  # the detection starts Node, npm and R
# The server chooses TCP ports before a kernel binds them. Another program could take a port in the
# meantime, so use IPC sockets.
c.KernelManager.transport = "ipc"
