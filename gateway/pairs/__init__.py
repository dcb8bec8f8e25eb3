"""The targets and drafts: their addresses, their health, and the choice among them."""
