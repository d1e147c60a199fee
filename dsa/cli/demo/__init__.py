"""The demo: Poincaré embeddings of a hierarchy, trained from a table on disk. See `dsa.cli.demo.command`."""
