"""Exchange of rows between workers: the cache partition, the send and receive state machines, and the network code."""
