"""Trust: the fp64 oracle, the numerics gate, properties, memory measurement, and the verification of whole packages."""
