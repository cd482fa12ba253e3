"""Measuring generated packages, alone and beside other libraries. A module is a stage:

campaign         a file's points, and which of them the output lacks
point            one size: who is measured there, with which features, and what a step is
contest          one point after the other, in a worker that may be lost, or in ranks
peers            the losses of contestants that are no packages
measure, ring    first each alone (memory, errors), then in turns (timing); on one device, on several
results, plots   rows: into a file, a table, a picture
board            the GPU's own meters: power, and counters of kernels
"""
