"""One model on several devices: tensor parallel, a process a device (a *rank*).

Rank 0 serves. The others follow: they hold the same layers with other heads, and run what rank 0
says, command by command (hippo.parallel.commands). See docs/architecture.md.
"""
