"""The command line: its commands, the demo and the benchmark."""
