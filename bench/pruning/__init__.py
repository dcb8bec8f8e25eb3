"""Evidence for semantic-aware token preservation: ``python -m bench.pruning --help``.

Nothing is imported here, so that the parts that need neither models nor clips stay light.
"""
