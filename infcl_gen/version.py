"""The version: written into every generated package, and part of the cache key of `infcl_gen.load`."""

__version__ = "0.1.0"


def installed(*names: str) -> dict[str, str]:
    """The versions of those of these distributions that are installed."""
    import importlib.metadata

    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
