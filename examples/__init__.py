"""Programs that use a gateway as its users do: over HTTP, without any of its packages."""
