"""`sched`: several backends share each graph, as `ggml_backend_sched` lets them.

`assign` places weights and caches, gives every node its device and cuts the graph; `plan` makes parts of a case of it;
`backend` runs the parts, as a `Backend`.
"""
