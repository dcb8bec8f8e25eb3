"""The commands of ``hippo`` that serve nobody."""
