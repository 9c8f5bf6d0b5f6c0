"""The hypothesis profile of this run: the same examples each time where CI is set, a growing database elsewhere."""

from conformance.suite.strategies import register_profiles

register_profiles()
