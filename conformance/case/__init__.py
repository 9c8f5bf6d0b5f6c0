"""Cases and case files: steps of graphs over persistent tensors, with their data and demands."""
