"""Measures operations beside other libraries: `python -m quackish bench` and the programs in benchmarks/.

    models, cells           what to measure: shapes of public models or the user's, the cells of a table
    operations, providers_* what can be measured: quackish and every peer, at their public entry points
    runner, processes       a whole run, and the child process that measures, so that a crash costs one provider
    measure, measure_*, host  one cell: time, memory and errors of each provider, beside the roof
    environment, results    a results file: its columns, and its rows by cell
    report, plots           what people read: verdicts, page, figures
    compare                 two results files
    console                 progress, SIGTERM

Packages of the extra `bench` are imported inside functions.
"""
