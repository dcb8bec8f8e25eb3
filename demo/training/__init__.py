"""Training of the bundled pair."""
