"""What both services are assembled from: settings, streams, metrics, start-up."""
