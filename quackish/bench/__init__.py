"""Measures operations beside other libraries: `python -m quackish bench` and the programs in benchmarks/.

    operations, cells   what can be measured; one shape, dtype and direction of it
    models, shapes      sizes of public models; what the user asks for
    providers_*         quackish and every peer, at their public entry points
    truth_*             input data, errors against fp64, and whether results repeat
    measured, measure_*, memory, host   one cell: time, memory and errors of each provider, beside the roof
    worker, supervisor  the process that measures, and the one that starts it and attributes its death
    runner              a whole run: progress, rows, resuming
    environment, results   the columns of a results file, and its rows by cell
    report, bars, plots what people read: page, verdicts, figures
    compare             two results files
    console             console and progress bar

Packages of the extra `bench` are imported inside functions.
"""
