"""The hypothesis profile of this run: the same examples each time where CI is set, a growing database elsewhere; and no
expected values kept on disk.
"""

import os

from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("local", print_blob=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile(
    "ci", print_blob=True, deadline=None, derandomize=True, database=None, suppress_health_check=_SLOW
)
os.environ["CONFORMANCE_EXPECTED"] = ""  # tests change kernels: no later run may find their values
settings.load_profile("ci" if os.environ.get("CI") else "local")
