"""The bytes of videos and images: fetched, uploaded or read."""
