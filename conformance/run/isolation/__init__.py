"""Keep a backend apart: workers, limits, seals and the watchdog."""
