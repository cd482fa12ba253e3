"""Cached packages under the names that pickles of their modules hold: `infcl_gen.packages.KEY`.

A process that unpickles a loss imports its package from the cache by this name.
"""

from infcl_gen.files import cache_folder

__path__ = [str(cache_folder())]
