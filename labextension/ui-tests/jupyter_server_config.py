# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The server of the browser tests. It takes all protection off: for tests only."""

from jupyter_client import launcher
from jupyterlab.galata import configure_jupyter_server

from tests.broker import forks

# Kernels are forked, as in the tests in Python: a start of one costs a fifth.
launcher.Popen = forks.kernels

c = get_config()  # noqa: F821
configure_jupyter_server(c)
c.ServerApp.ip = "127.0.0.1"
c.ServerApp.port = 0
c.JupyterNotebookApp.expose_app_in_browser = True
# Each page that is loaded would ask whether JupyterLab must be built: the server starts Node twice.
c.ServerApp.tornado_settings = {"page_config_data": {"buildCheck": False}}
c.LanguageServerManager.autodetect = False  # it starts Node, npm and R
# Ports are chosen before they are bound, and another program may take one in between.
c.KernelManager.transport = "ipc"
