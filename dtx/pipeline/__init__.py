"""The data pipeline on Spark: archive, reconcile and report over the journals of a fleet. Extra ``dtx[pipeline]``.

Of dtx, only the command line imports this package, and only for its pipeline command. The package uses the DataFrame
API alone, so that the same program runs in this process, on a cluster and through Spark Connect.
"""
