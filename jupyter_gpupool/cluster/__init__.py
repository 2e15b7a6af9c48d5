# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Several machines with one set of quotas.

====================  ==========================================================================
``messages``          what nodes and ledger tell each other (pure)
``ledger``            the ledger's side: who may have how much of which quota (pure)
``ledger_events``     what happens to a ledger, and what it wants done (pure)
``ledger_nodes``      what it knows of each node (pure)
``ledger_usage``      what users have used on all nodes, for fair shares (pure)
``queues``            which nodes wait for which key (pure)
``budgets``           a node's side: what its broker may grant without a message (pure)
``overlay``           between the pool's rules and the ledger's keys (pure)
``desk``              a ledger with a clock and a post
``broker_calls``      an agent's connection to its broker
``courier``           carries a broker's reports to a ledger, and answers back
``identity``          credentials that carry an order to another machine's broker
``munge``             credentials by the MUNGE daemons of the machines
``hub_tokens``        credentials by tokens of a JupyterHub
``authenticators``    the choice between these
``placing``           on which machine a kernel starts (pure)
``considering``       what other machines have to do with a wait, in words (pure)
``kernel_host``       becomes a kernel for a server on another machine, as its user
``mail``              carries orders between brokers, and their results
``ledger_service``    a ledger as a process behind a unix socket
``agent_service``     an agent as a process, with such a ledger
``node``              a machine joins a cluster: a raylet and an agent, supervised
``ray_ledger``        the ledger as a Ray actor, and an agent's way to it
``trial``             three machines on one host, to try it out
``ledger_calls``      questions of the commands to that ledger, with time limits
``ray_agent``         an agent as a process, with such a ledger
====================  ==========================================================================

Nothing here is imported on a machine that is in no cluster.
"""
