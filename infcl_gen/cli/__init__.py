"""The command line, `infcl-gen`: it reads flags, calls one function, and prints the result."""

from infcl_gen.cli import cache, measuring, options, packages, scaling, step, text
from infcl_gen.cli.group import main

__all__ = ["cache", "main", "measuring", "options", "packages", "scaling", "step", "text"]
