"""What all parts of the gateway know."""
