"""The version: written into every generated package, and part of the cache key of `infcl_gen.load`."""

__version__ = "0.1.0"
