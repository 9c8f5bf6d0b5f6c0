"""Spread a run over workers of Dask: chunks of cases are tasks; each requested pair gets one result."""
