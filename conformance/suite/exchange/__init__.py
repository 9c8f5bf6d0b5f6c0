"""Cases in the format of test-backend-ops `--test-file`: a line per op, without values."""
