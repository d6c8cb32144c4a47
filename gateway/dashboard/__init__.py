"""The dashboard: a page that shows what the gateway is doing, and the figures behind it."""
