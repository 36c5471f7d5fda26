"""Moving rows between workers: the cache partition, the two state machines, and the one file that uses the network."""
