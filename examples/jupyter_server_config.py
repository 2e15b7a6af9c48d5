# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
#
# A working admin configuration of the GPU pool, for a machine with two GPUs that a group shares.
# Copy what you need to /etc/jupyter/jupyter_server_config.py (the whole machine) or to
# ~/.jupyter/jupyter_server_config.py (only you). `jupyter gpupool generate-config` prints every
# option; `jupyter gpupool check-config` says whether the result is good. A running broker reads it
# again on SIGHUP (`systemctl reload gpupool`).

c = get_config()

# ---- What a kernel gets

# Guaranteed when it does not ask. A CUDA context is part of it: 0.3 to 0.6 GiB on real GPUs.
c.GPUPool.default_memory = "4GiB"

# The most that `%gpu 24GiB` may ask for. Without this line: the size of the GPU.
c.GPUPool.max_memory_per_kernel = "24GiB"

# "lazy", the default: the slice comes at the first CUDA call, so cells without one take nothing.
# "cell": it comes when a cell starts. "manual": only on `%gpu attach` or `%%gpu`.
c.GPUPool.attach = "lazy"

# ---- Who may have how much

# Per user, over all of the user's kernels; "*" is every user who is not named.
c.GPUPool.quotas = {
    "*": {"memory": "24GiB", "leases": 2, "suspended": "48GiB"},
    "ada": {"memory": "48GiB", "leases": 4},  # a paper is due
}

# The higher number goes first in the queue. Waiting raises a kernel by one point a minute.
c.GPUPool.priority_classes = {"interactive": 200, "notebook": 100, "batch": 0}
c.GPUPool.default_priority = "notebook"

# ---- When a slice goes back

# Without a running cell for this long, even if no kernel waits.
c.GPUPool.idle_timeout = "10m"

# Somebody waits: take a slice that has been idle for this long. 0 moves data most often.
c.GPUPool.reclaim_after = "20s"

# A cell gives up after waiting this long, with an error that says why.
c.GPUPool.max_wait = "1h"

# ---- The machine

# Of each GPU, never granted: room for a display or for monitoring tools.
c.GPUPool.reserve = "256MiB"

# Suspended kernels keep their GPU memory here, in host memory. See "Sizing host memory" in the
# documentation: half of the memory is a good start on a machine with as much RAM as GPU memory.
c.GPUPool.host_memory = "50%"

# Programs that use a GPU outside the pool are counted off its memory and named in the log.
c.GPUPool.foreign_processes = "report"

# Who may see and release every kernel, besides root.
c.GPUPool.admins = ["ada"]

# To try all this without a GPU, take away the '# ':
# c.GPUPool.emulate = "2x16GiB"
