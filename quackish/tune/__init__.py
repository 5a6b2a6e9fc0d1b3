"""Searches for faster configs: generates candidates near the analytical choice and times them.

`quackish tune` (quackish/cli/tune.py) runs the search and writes the results into the user's table.
"""
