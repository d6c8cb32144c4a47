"""KV caches that follow their trajectories to other engines."""
