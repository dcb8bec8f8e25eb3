"""The REST API: schemas, and their translation to values and back."""
