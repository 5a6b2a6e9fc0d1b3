"""Speed, memory and errors of quackish and its peers. Run as modules from the project's root; see README.md."""
