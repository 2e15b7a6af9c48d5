# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Programs in the pool that are not kernels: commands, services and scripts.

- ``opening``: a program's request, its session, and its environment
- ``terminal``: the child process of ``jupyter gpupool run``; its terminal, signals and exit code
- ``execution``: runs a command in a session, from its wait to its exit code; ``progress``: shows
  the wait on a line
- ``runfiles``: the records and logs of commands that run detached; ``detached``: their supervisor
- ``inscript``: the function ``jupyter_gpupool.slice``

The agent of an IPython kernel knows the kernel's cells, so the agent owns the lease and answers the
broker's ``yield``. A program has no agent. The program joins its session as a *member* (see
``protocol``). If ``jupyter gpupool run`` started the program, this command joins the session as a
member, too.
"""
