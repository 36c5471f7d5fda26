"""Arguments and help of the commands. A command loads the module that does its work when it runs."""
