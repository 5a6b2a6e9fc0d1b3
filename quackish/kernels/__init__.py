"""Device code that several operations use, in CuTe DSL. No torch."""
