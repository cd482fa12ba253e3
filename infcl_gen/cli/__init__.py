"""The command line, `infcl-gen`: a thin layer that reads flags, calls one function, and prints its result."""

from infcl_gen.cli import measuring, options, packages, scaling, text
from infcl_gen.cli.group import main

__all__ = ["main", "measuring", "options", "packages", "scaling", "text"]
