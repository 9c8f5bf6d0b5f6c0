"""Spread a run over Dask workers: chunks of cases are tasks, each pair gets one result."""
