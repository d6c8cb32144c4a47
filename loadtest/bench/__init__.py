"""What the gateway costs beside rivals: a server that is never the bottleneck, a client that checks, one run."""
