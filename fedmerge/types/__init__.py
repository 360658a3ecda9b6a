"""Frozen values that travel between the parts of fedmerge."""
