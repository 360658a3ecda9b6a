"""Benchmarks: ratios within one run, next to the bars that they are to meet."""
