"""Measures operations and other libraries, for `quackish bench` and the programs in benchmarks/.

    cells                   what to measure: operation, shape, dtype, direction
    table, providers_*      how each operation is measured; quackish and its peers, called at their public entry points
    runner, processes       a whole run; the child process that measures, so that a crash costs only one provider
    measure, measure_*, host  one cell: time, memory and errors of each provider, and the roof
    environment, results    columns and rows of a results file
    report, plots           pages, figures
    compare                 compares two results files

Packages of the extra `bench` are imported inside functions.
"""
