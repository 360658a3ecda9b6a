"""The algorithms, readable as such: match, plan, inspect, verify, convert, load."""
