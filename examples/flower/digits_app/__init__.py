"""Matched averaging of digits with Flower."""
