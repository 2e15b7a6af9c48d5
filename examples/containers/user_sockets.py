"""For the machine's broker: kernels in containers, each user with a socket of their own."""

c = get_config()

c.GPUPool.user_sockets = True
