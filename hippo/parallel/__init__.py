"""One model on several devices by tensor parallelism, with one process (*rank*) per device.

Rank 0 serves. The other ranks, the followers, hold the same layers with other heads, and execute
rank 0's commands (hippo.parallel.commands). See docs/architecture.md.
"""
