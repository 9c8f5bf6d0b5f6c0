"""Group the failures of a run into causes, each with a rule, a smallest case and its reach."""
