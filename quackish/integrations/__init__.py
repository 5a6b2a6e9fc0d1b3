"""quackish in other libraries' models. Nothing here is imported before it is asked for."""
