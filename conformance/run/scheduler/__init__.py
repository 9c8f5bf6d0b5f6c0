"""The backend `sched`: several backends share each graph, as with `ggml_backend_sched`.

`assign` places weights and caches, assigns nodes to devices and splits the graph; `plan` makes cases of the splits;
`backend` runs them, as a `Backend`.
"""
