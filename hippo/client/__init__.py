"""A client of the REST API: what `hippo ask`, `hippo caption`, `hippo bench` and `bench` ask with,
and the figures of the answers."""
