"""npu: static shapes, chunks and the LLM pipeline."""
