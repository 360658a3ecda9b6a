"""Rounds with the clients' data: FedMA, with communication, and the baselines."""
