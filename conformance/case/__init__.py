"""A case and its file: steps of graphs over living tensors, what it demands, where its values come from."""
