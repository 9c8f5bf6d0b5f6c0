"""Cases in the format that test-backend-ops reads with `--test-file`: a line for each op, without values."""
