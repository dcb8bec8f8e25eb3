"""The tables of README and docs, and .env.example, written by commands."""
