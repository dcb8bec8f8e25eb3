"""Drafts of lower agreement, their traces, and what is possible with them."""
