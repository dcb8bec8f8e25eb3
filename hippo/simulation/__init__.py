"""Predictions without hardware: machines, traces of agreement, replays, published pairs."""
