"""Damaged and hostile files, by the thousand: `make fuzz`."""
