# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Several machines with one set of quotas.

====================  ==========================================================================
``messages``          the messages between nodes and ledger (pure)
``ledger``            the ledger's side: how much of each quota each node may use (pure)
``ledger_events``     the events for a ledger, and the actions that it returns (pure)
``ledger_nodes``      what the ledger knows about each node (pure)
``ledger_counts``     the sums over all nodes of each key (pure)
``ledger_gone``       GPU-seconds that gone nodes have used (pure)
``ledger_usage``      what users have used on all nodes, for fair shares (pure)
``queues``            which nodes wait for which key (pure)
``budgets``           a node's side: what its broker may grant without a message (pure)
``overlay``           translates between the pool's rules and the ledger's keys (pure)
``desk``              a ledger in an event loop, with a clock, that reads and sends text
``broker_calls``      an agent's connection to its broker
``courier``           carries a broker's reports to a ledger, and answers back
``identity``          credentials that carry an order to another machine's broker
``munge``             credentials by the MUNGE daemons of the machines
``hub_tokens``        credentials by tokens of a JupyterHub
``authenticators``    chooses ``munge`` or ``hub_tokens``
``placing``           on which machine a kernel starts (pure)
``considering``       tells users what other machines have while a kernel waits (pure)
``kernel_host``       starts a kernel, as its user, for a server on another machine
``mail``              carries orders between brokers, and their results
``ledger_service``    a ledger as a process behind a unix socket
``agent_service``     an agent as a process, which uses such a ledger
``node``              a machine joins a cluster: a raylet and an agent, supervised
``ray_ledger``        the ledger as a Ray actor, and an agent's connection to it
``trial``             three machines on one host, to try out a cluster
``ledger_calls``      calls of the commands to the ledger in Ray, with time-outs
``ray_agent``         an agent as a process, which uses the ledger in Ray
====================  ==========================================================================

A machine that is in no cluster imports no module of this package.
"""
