"""What agents do: trajectories drawn from laws or read from traces. Pure data, no clock and no sockets."""
