"""Load from outside: the replayer and the Locust users. They know workloads and HTTP, nothing of Heddle's inside."""
