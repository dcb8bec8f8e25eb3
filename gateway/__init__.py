"""REST in, gRPC out: the process that users talk to. It starts without torch.

Each room imports only from the rooms above it:

    common   settings, errors, keys, metrics
    door     what every request passes: connections, sites, limits
    pairs    the services: found, watched, and chosen for a request
    media    bytes of a request's videos and images
    answer   one answer: both streams, the state machine's messages, its text, its report
    api      routes, schemas and their documentation

``app`` puts them together, and ``server`` runs it.
"""
