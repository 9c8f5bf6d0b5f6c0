"""Reports: tables, drawings, JSON."""
