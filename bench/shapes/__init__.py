"""Models of published shapes with random weights."""
