"""Measures a running server over its REST API."""
