"""Conformance and regression tests for backends that execute ggml compute graphs."""

__version__: str


def __getattr__(name: str) -> str:
    """Return `__version__`, read on demand, since importlib.metadata is slow to import."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  # as above

    try:
        return version("ggml-conformance")
    except PackageNotFoundError:  # not installed, only on the path
        return "0"
