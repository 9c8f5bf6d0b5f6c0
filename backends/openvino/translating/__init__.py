"""Base of backends that compile graphs: plans, templates, symbolic shapes."""
