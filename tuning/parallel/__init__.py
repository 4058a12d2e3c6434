"""Independent jobs in processes that can be killed, on this machine or on the nodes of a Ray cluster.

    Pool        submits jobs and polls results                                     pool.py
      Local     one host process on this machine                                   local.py
      Node      an actor on each node of a Ray cluster, each with a Local host     cluster.py
    host        imports the target once and forks one child a job or session       host.py

Nothing here imports JAX or numpy.
"""
