"""For the machine's broker: kernels run in containers, and each user has their own socket."""

c = get_config()

c.GPUPool.user_sockets = True
