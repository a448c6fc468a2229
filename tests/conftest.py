"""Settings of every test."""

import hypothesis

# A busy machine is no failure of a property, and a database of examples would make one run depend on the one before.
hypothesis.settings.register_profile(
    "project", deadline=None, database=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("project")
