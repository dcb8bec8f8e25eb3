"""Simulated decoding: machines, agreement traces, their replay, and the papers' pairs."""
