"""The asynchronous parameter server, on real workers and simulated."""
