"""One question at a time: the measured systems, and what a run of each gives."""
