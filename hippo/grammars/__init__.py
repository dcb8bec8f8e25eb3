"""Bounds of what a client's grammar may cost, and the processes that try grammars within them.

This file imports nothing, because such a process imports the package and must start quickly.
"""
