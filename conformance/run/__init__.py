"""Running cases: oracles, isolation, first divergence."""
