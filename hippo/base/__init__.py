"""The plain base: settings, logs, files, tasks and processes; no torch, no gRPC."""
