"""Cases and case files: steps of graphs over persistent tensors, with data and demands."""
