"""What an engine knows of a model, and what a plan says of how to load it."""
