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

# The slice of a kernel that asks for no size. It includes a CUDA context, which takes 0.3 to 0.6
# GiB on a real GPU.
c.GPUPool.default_memory = "4GiB"

# The most that a user can ask for with `%gpu 24GiB`. The default is the size of the GPU.
c.GPUPool.max_memory_per_kernel = "24GiB"

# "lazy", the default: a kernel gets its slice at its first CUDA call, so cells without CUDA take no
# slice. "cell": it gets a slice when a cell starts. "manual": it gets one only on `%gpu attach` or
# `%%gpu`.
c.GPUPool.attach = "lazy"

# ---- Who may have how much

# The limits of one user, for all the user's kernels together. "*" means each user who has no line
# here.
c.GPUPool.quotas = {
    "*": {"memory": "24GiB", "leases": 2, "suspended": "48GiB"},
    "ada": {"memory": "48GiB", "leases": 4},  # this user gets more until a paper is finished
}

# A kernel with a higher number is earlier in the queue. Each minute of waiting adds one point.
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

# The pool never grants this much memory of each GPU. It is room for a display or monitoring tools.
c.GPUPool.reserve = "256MiB"

# The most host memory that the state of suspended kernels may take. See "Sizing host memory" in the
# documentation. Half is a good start on a machine with as much RAM as GPU memory.
c.GPUPool.host_memory = "50%"

# The pool subtracts the memory of programs outside it, and names them in the log.
c.GPUPool.foreign_processes = "report"

# Users who may see and release every kernel, besides root.
c.GPUPool.admins = ["ada"]

# To try all this without a GPU, remove the '# ':
# c.GPUPool.emulate = "2x16GiB"
