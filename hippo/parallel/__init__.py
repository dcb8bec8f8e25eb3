"""One model in several processes (*ranks*) by tensor parallelism, on a GPU each or on one CPU.

Rank 0 serves. The other ranks, the followers, hold the same layers with other heads, and execute
rank 0's commands (hippo.parallel.commands). See docs/architecture.md.
"""
