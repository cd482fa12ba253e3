"""Measuring generated packages, alone and beside other libraries. A module is a stage:

campaign         a file's points, and which of them the output lacks
point            one size, and who is measured there
contest          one point after the other, in a worker that may be lost, or in ranks
steps, peers     what each contestant runs: a forward and a backward
measure, ring    first each alone (memory, errors), then in turns (timing); on one device, on several
results, plots   rows: into a file, a table, a picture
board            the GPU's own meters: power, and counters of kernels
"""
