"""One-shot merges that look at what the clients do: probes, signatures, fits and verdicts."""
