"""Measures operations beside other libraries: `python -m quackish bench`, and what the programs in benchmarks/ are of.

    operations    what can be measured: the names of an operation's dimensions, directions and providers
    models        hidden sizes, vocabularies and norms of public models
    shapes        what the user asks for, as shapes
    providers_*   who computes an operation: quackish, and every peer at its public entries
    truth_*       how far the results are from fp64, and whether they repeat
    measure_*     one cell: who fails and why, time, memory, errors, in the same turns as the roof
    worker        the process that measures
    supervisor    starts workers, and knows whose fault it was when one dies
    runner        a whole run: cells, progress, rows, resuming
    schema        the columns of its CSV
    results, report, plots, figures    what people read of it
    compare       two CSVs

Packages of the extra `bench` are imported inside functions.
"""
