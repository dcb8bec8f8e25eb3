"""One question at a time: systems, rivals, and what a run of each gives."""
