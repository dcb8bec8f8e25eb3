"""Decodes media bytes to frames, in a worker process that can be killed.

This file imports nothing, because the worker process imports the package and must start quickly.
"""
