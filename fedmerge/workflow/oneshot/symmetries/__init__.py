"""Clients rewritten before they are matched, so that they are more alike and compute the same."""
