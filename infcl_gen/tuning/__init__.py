"""Which settings of a package are the fastest on this machine."""
