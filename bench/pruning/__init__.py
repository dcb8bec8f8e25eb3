"""Experiments on visual token pruning: ``python -m bench.pruning --help``."""
