"""Load from outside: the replayer and the Locust users. They know workloads and HTTP, and nothing of Heddle's
internals.
"""
