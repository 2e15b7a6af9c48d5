"""Settings of the machine's broker for kernels in containers: each user has a separate socket."""

c = get_config()

c.GPUPool.user_sockets = True
