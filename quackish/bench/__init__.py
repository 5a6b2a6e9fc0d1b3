"""Measures operations beside other libraries: `python -m quackish bench` and the programs in benchmarks/.

From a request to a page, in this order:

    models, shapes, cells   what is asked for: public models, the user's shapes, the cells of a table
    operations, providers_* what can be measured: quackish and every peer, at their public entry points
    runner                  a whole run: progress, rows, resuming
    processes               the child that measures, and the supervisor that starts it and attributes its death
    measured, measure_*, host, truth_*   one cell: time, memory and errors of each provider, beside the roof
    environment, results    a results file: its columns, and its rows by cell
    report, bars, plots     what people read: page, verdicts, figures
    compare                 two results files
    console                 console and progress bar

Packages of the extra `bench` are imported inside functions.
"""
