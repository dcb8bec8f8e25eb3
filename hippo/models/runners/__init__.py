"""The decoder layers, and the ways to run a forward."""
