"""Code that runs in the client's process: the classes that users hold, and the calls to the scheduler."""
