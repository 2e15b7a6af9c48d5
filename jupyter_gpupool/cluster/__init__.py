# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Several machines with one set of quotas.

::

    messages  <-  ledger    the ledger's side: who may have how much of which quota (pure)
              <-  budgets   a node's side: what its broker may grant without a message (pure)

Nothing here is imported on a machine that is in no cluster.
"""
