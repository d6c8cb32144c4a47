"""For all tests: a busy machine may stall for seconds, so no example of a property has a deadline."""

from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
