"""Media bytes to frames, in worker processes that can be killed.

Nothing is imported here: the worker process imports this package and must stay light.
"""
