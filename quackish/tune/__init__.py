"""The search for a faster config: candidates around the analytical choice, and their times.

`python -m quackish tune` (quackish/cli/tune.py) runs it and writes what it finds into the user's table.
"""
