"""A ggml device of our own that is as lazy, or as eager, as the interface allows."""
