"""Measures operations and other libraries, for `quackish bench` and the programs in benchmarks/.

    cells                   what to measure: operation, shape, dtype, direction
    definition, table       how each operation is measured: quackish/ops/*/measure.py, and providers.py with its peers
    runner, processes       a whole run; the child process that measures, so that a crash costs only one provider
    measure, host           one cell: time, memory and errors of each provider, and the roof
    environment, results    columns and rows of a results file
    report, plots           pages, figures

Packages of the extra `bench` are imported inside functions.
"""
