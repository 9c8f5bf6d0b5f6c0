"""openvino-stateful: caches as variables of the compiled model."""
