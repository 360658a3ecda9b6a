"""Files of strangers, made hostile on purpose: mutants of every container, and what they cost."""
