"""One answer: its two streams, its text, its events and its report."""
