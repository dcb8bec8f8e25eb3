"""All measurements for a machine with a GPU; see ``python -m bench.gpu --help``."""
