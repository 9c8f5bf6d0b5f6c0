"""From failures to causes: few bugs, each with a predicate, its smallest proof and whom it hurts."""
