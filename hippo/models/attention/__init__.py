"""Attention of several sequences over a KV cache that is written in place."""
