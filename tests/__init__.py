"""Tests import their helpers by one path, `tests.NAME`: pytest puts only the folder above on sys.path."""
