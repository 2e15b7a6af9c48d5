# Each broker, each agent and the ledger reads these lines. The lines are the same on all machines.
import os

c = get_config()

# The names of all machines of the pool, as in `kubectl get nodes`. The ledger waits for each
# machine.
c.GPUPool.cluster_nodes = ["gpu-a", "gpu-b"]
# The downward API sets this variable to the name of the machine, see nodes.yaml.
c.GPUPool.cluster_node = os.environ.get("NODE_NAME", "")
# The agent's container runs as the user with the id 990. The broker's container has no name for
# this user, so the user's name here is "uid-" and the id.
c.GPUPool.cluster_agent = "uid-990"

c.GPUPool.socket = "/run/gpupool/broker.sock"
c.GPUPool.state_dir = "/var/lib/gpupool"

# Each server of the Hub has its socket in a folder below /run/gpupool/users, see hub-values.yaml.
c.GPUPool.user_sockets = True
c.GPUPool.quotas = {"*": {"memory": "40GiB", "leases": 4}}
c.GPUPool.on_ledger_loss = "closed"
