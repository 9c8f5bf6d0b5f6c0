"""Ways of the family `functions`: functions of a library that no graph of the suite calls."""
