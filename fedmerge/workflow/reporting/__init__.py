"""From a merge record and its files to the values that a report shows."""
