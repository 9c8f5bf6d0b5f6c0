"""Settings of this run: hypothesis profile, garbage collector, folders, caches.

Hypothesis draws the same examples each time where CI is set, else from a growing database. No expected values are kept
on disk, the temporary folder is the run's own, and one shrink runs at a time.
"""

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from conformance.run.shrink import workers

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("local", print_blob=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile(
    "ci", print_blob=True, deadline=None, derandomize=True, database=None, suppress_health_check=_SLOW
)
os.environ["CONFORMANCE_EXPECTED"] = ""  # tests change kernels: no later run may find their values
settings.load_profile("ci" if os.environ.get("CI") else "local")
gc.set_threshold(20_000)  # by default the collector takes a tenth of the time: modules and tests stay anyway


def pytest_collection_finish() -> None:
    """Exempt collected tests from garbage collection; they live until the session ends."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_worker() -> Iterator[None]:
    """A search shrinks one case at a time: the other processors run other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "MOST", 1)
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A run gets a temporary folder of its own.

    A run recovers the cases of a killed one from there, and must not find those of another worker.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr(tempfile, "tempdir", None)
        yield
