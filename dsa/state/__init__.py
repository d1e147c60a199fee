"""A state directory: its tables, its description, its journal, and how it is opened and changed."""
