# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The server of the browser tests. It takes all protection off: for tests only."""

from jupyterlab.galata import configure_jupyter_server

c = get_config()  # noqa: F821
configure_jupyter_server(c)
c.ServerApp.ip = "127.0.0.1"
c.ServerApp.port = 0
c.JupyterNotebookApp.expose_app_in_browser = True
c.LanguageServerManager.autodetect = False  # it starts Node, npm and R
# Ports are chosen before they are bound, and another program may take one in between.
c.KernelManager.transport = "ipc"
