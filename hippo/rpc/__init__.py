"""gRPC: messages to values and back, servers, clients, and one mapping of errors to statuses."""
