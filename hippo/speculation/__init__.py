"""Parallel speculative decoding without I/O: verifier, drafter, coordinator and policies."""
