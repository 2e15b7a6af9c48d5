# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Programs in the pool that are not kernels: commands, services, scripts.

- ``opening``: what a program asks for, its session, its environment
- ``terminal``: the child process of ``jupyter gpupool run``: terminal, signals, exit code
- ``execution``: runs a command in a session, from its wait to its exit code; ``progress``: the line
  that shows the wait
- ``runfiles``: the records and logs of commands that run detached; ``detached``: their supervisor
- ``inscript``: ``jupyter_gpupool.slice``

The agent of an IPython kernel owns the lease and answers for its cells. A program has no agent: it
joins its session as a *member* (see ``protocol``), and so does the command that started it.
"""
