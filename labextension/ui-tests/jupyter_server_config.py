# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Configures the server of the browser tests. It has no protection: use it for tests only."""

from jupyter_client import launcher
from jupyterlab.galata import configure_jupyter_server

from tests.broker import forks

# Kernels are forked, as in the Python tests. A start then costs a fifth of the CPU time.
launcher.Popen = forks.kernels

c = get_config()  # noqa: F821
configure_jupyter_server(c)
c.ServerApp.ip = "127.0.0.1"
c.ServerApp.port = 0
c.JupyterNotebookApp.expose_app_in_browser = True
# Otherwise each loaded page asks whether to build JupyterLab, and the server starts Node twice.
c.ServerApp.tornado_settings = {"page_config_data": {"buildCheck": False}}
c.LanguageServerManager.autodetect = False  # the detection starts Node, npm and R
# TCP ports are chosen before they are bound, so another program could take one in between.
c.KernelManager.transport = "ipc"
