# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The guard: native code (in ``src/``) between a session's processes and the CUDA driver.

Begin with ``README.md``: it describes the path of a call, and which file in ``src/`` does what.

- ``page``: how the broker reads and writes a session's page; ``src/page.h`` has the same layout.
- ``install``: finds the compiled guard, and makes the environment that loads it.
- ``build``: compiles ``src/`` into the guard's two libraries.
- ``_generate``: generates entry points and tables from ``entries.txt`` and ``nvml_entries.txt``,
  for ``build``.
"""
