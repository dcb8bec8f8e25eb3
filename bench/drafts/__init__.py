"""Drafts of lower agreement, and what their agreement gives."""
