"""A campaign: one run over many workers of Dask. Chunks of cases are tasks; each pair asked for is answered once."""
