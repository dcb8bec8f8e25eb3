"""Published models: their configurations, the shapes and sizes that follow from them, and which go
together as a pair. Standard library only."""
