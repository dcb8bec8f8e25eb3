"""What all measurements share: clips, options, the machine, tables and their cells."""
