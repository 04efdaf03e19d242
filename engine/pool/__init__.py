"""The worker pool: named, long-lived Ray actors that hold the model while flows come and go.

A flow talks to one class, `engine.pool.client.PoolClient`, which attaches by name, takes a lease and calls operations:

    client     light; runs in the flow's process, imports Ray only when it is used
    cluster    starts and stops the local Ray of a machine that has no Ray cluster
    supervisor one actor a pool: leases, operation ids, weight version, watch over the ranks
    ranks      the group of rank actors: start, execute on all, notice a death, kill
    rank       the actor around one worker object (`engine.worker:Worker`)
    lease      who may use the pool now (fencing tokens); pure
    operations which operations ran, run or may run; pure

Nothing of this imports torch. No tensor passes through it: arguments and outcomes are small JSON objects.
"""
