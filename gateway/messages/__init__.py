"""What clients and engines say, read: whose a request is, what an answer holds."""
