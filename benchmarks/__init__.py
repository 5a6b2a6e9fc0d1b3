"""Speed, memory and error of quackish beside its peers. Run as modules from the project's root; see README.md."""
