# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
#
# A working admin configuration of the GPU pool, for a machine with two GPUs that a group shares.
# Copy what you need to /etc/jupyter/jupyter_server_config.py (the whole machine) or to
# ~/.jupyter/jupyter_server_config.py (only you). `jupyter gpupool generate-config` prints every
# option; `jupyter gpupool check-config` checks the result. A running broker reads the files again
# on SIGHUP (`systemctl reload gpupool`).

c = get_config()

# ---- What a kernel gets

# The size of a kernel that does not ask. A CUDA context is part of it: 0.3 to 0.6 GiB on real GPUs.
c.GPUPool.default_memory = "4GiB"

# The largest size for `%gpu 24GiB`. Without this line: the size of the GPU.
c.GPUPool.max_memory_per_kernel = "24GiB"

# "lazy", the default: the slice comes at the first CUDA call, so other cells take none.
# "cell": a slice comes when a cell starts. "manual": only on `%gpu attach` or `%%gpu`.
c.GPUPool.attach = "lazy"

# ---- Who may have how much

# Per user, over all of the user's kernels; "*" stands for all users without a line here.
c.GPUPool.quotas = {
    "*": {"memory": "24GiB", "leases": 2, "suspended": "48GiB"},
    "ada": {"memory": "48GiB", "leases": 4},  # more, until a paper is done
}

# A higher number goes first in the queue. Waiting raises a kernel by one point a minute.
c.GPUPool.priority_classes = {"interactive": 200, "notebook": 100, "batch": 0}
c.GPUPool.default_priority = "notebook"

# ---- When a slice goes back

# An idle slice goes back after this time without a running cell, even if no kernel waits.
c.GPUPool.idle_timeout = "10m"

# A waiting kernel may take a slice that has been idle for this long. 0 causes the most moves.
c.GPUPool.reclaim_after = "20s"

# A cell gives up after waiting this long, with an error that says why.
c.GPUPool.max_wait = "1h"

# ---- The machine

# Of each GPU the pool never grants this much: room for a display or for monitoring tools.
c.GPUPool.reserve = "256MiB"

# Suspended kernels keep their GPU memory here, in host memory. See "Sizing host memory" in the
# documentation: half of the memory is a good start on a machine with as much RAM as GPU memory.
c.GPUPool.host_memory = "50%"

# The pool subtracts the memory of programs outside it, and names them in the log.
c.GPUPool.foreign_processes = "report"

# Users who may see and release every kernel, besides root.
c.GPUPool.admins = ["ada"]

# To try all this without a GPU, remove the '# ':
# c.GPUPool.emulate = "2x16GiB"
