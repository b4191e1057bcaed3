"""Custom models: model classes that a repository brings itself, through ``auto_map``."""
