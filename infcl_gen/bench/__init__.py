"""Measuring generated packages, alone and beside other libraries. Each module is one stage:

campaign         the points of a file, and which of them the output lacks
point            one size: its contestants, features, and the timed step
contest          points one after the other, in a replaceable worker process or in ranks
peers            the losses of other libraries
measure, ring    memory and errors of each alone, then times in turns (timing); on one device, on several
results, plots   rows written to a file, a table, a picture
board            the GPU's own meters: power, and counters of kernels
"""
