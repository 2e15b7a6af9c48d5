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

# The size of the slice if a kernel asks for no size. A CUDA context takes 0.3 to 0.6 GiB of the
# slice on a real GPU.
c.GPUPool.default_memory = "4GiB"

# The largest slice that a user can ask for, for example with `%gpu 24GiB`. The default is the size
# of the GPU.
c.GPUPool.max_memory_per_kernel = "24GiB"

# "lazy", the default: a kernel gets its slice at its first CUDA call, so cells without CUDA take no
# slice. "cell": it gets a slice when a cell starts. "manual": it gets one only on `%gpu attach` or
# `%%gpu`.
c.GPUPool.attach = "lazy"

# ---- Who may have how much

# The limits of each user. A limit counts all kernels of the user together. The entry "*" is for
# each user without an own entry.
c.GPUPool.quotas = {
    "*": {"memory": "24GiB", "leases": 2, "suspended": "48GiB"},
    "ada": {"memory": "48GiB", "leases": 4},  # this user gets more until a paper is finished
}

# A kernel whose class has a higher number is earlier in the queue. A kernel gains one point for
# each minute of waiting.
c.GPUPool.priority_classes = {"interactive": 200, "notebook": 100, "batch": 0}
c.GPUPool.default_priority = "notebook"

# ---- When a slice goes back

# An idle slice goes back after this time without a running cell, even if no kernel waits.
c.GPUPool.idle_timeout = "10m"

# A waiting kernel may take a slice that has been idle for this long. With 0, slices change their
# kernel most often.
c.GPUPool.reclaim_after = "20s"

# A cell waits at most this long for a slice. It then fails with an error that names the reason.
c.GPUPool.max_wait = "1h"

# ---- The machine

# The pool never grants this much memory of each GPU. It is room for a display or monitoring tools.
c.GPUPool.reserve = "256MiB"

# The limit of host memory for the state of suspended kernels. See "Sizing host memory" in the
# documentation. If the machine has as much RAM as GPU memory, half of the RAM is a good start.
c.GPUPool.host_memory = "50%"

# Programs outside the pool may use GPU memory. The pool does not grant this memory to kernels, and
# names these programs in the log.
c.GPUPool.foreign_processes = "report"

# Users who may see and release every kernel, besides root.
c.GPUPool.admins = ["ada"]

# To try all this without a GPU, remove the '# ':
# c.GPUPool.emulate = "2x16GiB"
