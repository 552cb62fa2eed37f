"""What repeats the paper: models, data sets, training, experiments, tables and figures.

The rest of the package does not import it.
"""
